"""Loads a policy from a run, a checkpoint or a model, to play or to serve it."""

import sys
from pathlib import Path
from typing import Any

from turnwise.config.schema import Config
from turnwise.evaluate.evaluation import PolicyPlayer
from turnwise.rollout.speakers import PlayerError


def load_policy(
    config: Config,
    *,
    run: Path | None = None,
    model: str | None = None,
    first: bool = False,
    name: str = "policy",
) -> PolicyPlayer:
    """The policy of a run's last checkpoint, of its first (`first`), of a model, or of the config
    alone."""
    from turnwise.generate.hf import HFGenerator
    from turnwise.models.policy import Precision, cast_parameters, load_model, load_tokenizer
    from turnwise.train.checkpoint import check_files
    from turnwise.train.warmstart import build_embedded

    where: str | Path | None = model or config.model.path
    stored = run is not None and model is None
    if run is not None and stored and not first:
        where = _trained(run)
    elif run is not None and stored and (run / "initial_model").is_dir():
        where = check_files(run / "initial_model")
    if where is None:
        network, tokenizer, _ = build_embedded(config)
    else:
        settings = config.model.model_copy(
            update={"path": str(where), "gguf_file": None, "tokenizer": None, "adapter": None}
        )
        same = str(where) == config.model.path
        network = load_model(config.model if same else settings)
        tokenizer = load_tokenizer(config.model if same else settings)
    precision = Precision.choose(config.model.dtype, device=config.train.device)
    sampler: Any = cast_parameters(network.to(device=precision.device), precision.dtype).eval()
    generator = HFGenerator(
        sampler,
        tokenizer,
        slots=config.rollout.slots,
        max_context=config.rollout.max_context,
        deterministic=config.train.deterministic,
    )
    return PolicyPlayer(generator=generator, tokenizer=tokenizer, name=name, model=sampler)


def _trained(run: Path) -> Path:
    """The model of a run's last complete checkpoint. Warns about later, incomplete ones.

    Raises:
        PlayerError: there is no checkpoint, or only that of step 0.
    """
    from turnwise.train.checkpoint import latest_checkpoint

    torn: list[str] = []
    checkpoint = latest_checkpoint(run / "checkpoints", refused=torn.append)
    for message in torn:
        print(f"WARNING: {message}", file=sys.stderr)
    if checkpoint is None:
        raise PlayerError(f"{run} has no complete checkpoint; give a model, or train first")
    if checkpoint.step == 0:
        raise PlayerError(
            f"{run} has only the checkpoint of step 0, before training; to use it, name "
            f"it: {checkpoint.path}"
        )
    if torn:
        print(f"WARNING: using {checkpoint.path}", file=sys.stderr)
    return checkpoint.model
