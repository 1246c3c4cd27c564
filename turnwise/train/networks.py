# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""From a config to the networks of a run, and from a checkpoint back to them."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from turnwise.algos.algorithm import Algorithm
from turnwise.config.schema import Config
from turnwise.models.policy import (
    Policy,
    Precision,
    add_lora,
    load_model,
    load_tokenizer,
    make_critic,
    make_reference,
    prepare,
    quiet,
)
from turnwise.seeding import derive_seed
from turnwise.train.checkpoint import Checkpoint, CheckpointError, check_files, write_folder
from turnwise.train.warmstart import build_embedded

Say = Callable[[str], None]


def first_policy(
    config: Config, *, initial: Path, say: Say
) -> tuple[nn.Module, Any, dict[str, float]]:
    """(model, tokenizer, metrics) before training: the config's model, or the embedded one after
    its warm start.

    The embedded model is also stored at `initial`, so that a resumed run has the same reference
    without warming up again.
    """
    if config.model.path is not None:
        return load_model(config.model), load_tokenizer(config.model), {}
    model, tokenizer, metrics = build_embedded(config, progress=say)
    write_folder(initial, lambda path: save_pretrained(model, tokenizer, path))
    return model, tokenizer, metrics


def build_policy(
    config: Config,
    algorithm: Algorithm | None,
    *,
    initial: Path,
    checkpoint: Checkpoint | None,
    say: Say,
    imitated: tuple[nn.Module, Any] | None = None,
) -> tuple[Policy, dict[str, float]]:
    """The run's policy, as the config describes it or as the checkpoint left it.

    Args:
        algorithm: None: neither a critic nor a reference is needed.
        imitated: the model and its tokenizer after imitation, where that just happened. Otherwise
            it is at `initial`.
    """
    precision = Precision.choose(config.model.dtype, device=config.train.device)
    metrics: dict[str, float] = {}
    embedded, staged = config.model.path is None, imitates_first(config)
    if imitated is not None:
        model, tokenizer = imitated
        checkpointing = config.model.gradient_checkpointing is True
        model = prepare(model, gradient_checkpointing=checkpointing)
    elif staged:
        model = load_model(config.model, path=check_files(initial))
        tokenizer = load_stored_tokenizer(initial)
    elif checkpoint is None or (embedded and not initial.is_dir()):
        model, tokenizer, metrics = first_policy(config, initial=initial, say=say)
    elif embedded:
        model = load_model(config.model, path=check_files(initial))
        tokenizer = load_stored_tokenizer(initial)
    else:
        model, tokenizer = load_model(config.model), load_tokenizer(config.model)
    lora = config.model.lora.rank > 0
    needs_reference = algorithm is not None and algorithm.needs_reference
    reference = make_reference(model) if needs_reference and not lora else None
    if lora:
        model = add_lora(model, config.model.lora, seed=derive_seed(config.seed, "lora"))
    critic = (
        make_critic(model, shared=config.model.critic == "shared")
        if algorithm is not None and algorithm.needs_critic
        else None
    )
    if checkpoint is not None and not lora:
        stored = load_model(config.model, path=checkpoint.model)
        _take_over(model, stored.state_dict(), checkpoint)
    policy = Policy(
        model,
        tokenizer,
        precision=precision,
        temperature=config.rollout.temperature,
        critic=critic,
        reference=reference,
        adapter_reference=lora and needs_reference,
        compile=config.train.compile,
    )
    return policy, metrics


def imitates_first(config: Config) -> bool:
    """Whether a run imitates demonstrations and then trains the result."""
    return bool(config.sft.source) and config.train.steps > 0


def plain_model(policy: Policy) -> nn.Module:
    """The policy's network in float32 on the CPU, with its adapters merged. The policy is of no use
    afterwards."""
    policy.masters.dissolve()
    model = policy.model.float().to("cpu")
    if _is_peft(model):
        model = cast(nn.Module, cast(Any, model).merge_and_unload())
    cast(Any, model).gradient_checkpointing_disable()
    return model.requires_grad_(True)


def policy_tensors(policy: Policy) -> dict[str, Tensor]:
    """Trainable tensors that the checkpoint's Hugging Face directory does not hold: adapters and
    the critic, in float32."""
    found: dict[str, Tensor] = {}
    with policy.masters.in_place():
        if _is_peft(policy.model):
            names = {
                name
                for name, parameter in policy.model.named_parameters()
                if parameter.requires_grad
            }
            found |= {
                f"adapter.{name}": tensor
                for name, tensor in policy.model.state_dict().items()
                if name in names
            }
        if policy.critic is not None:
            found |= {
                f"critic.{name}": tensor for name, tensor in policy.critic.state_dict().items()
            }
    return found


def load_policy_tensors(
    policy: Policy, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Loads what `policy_tensors` returned."""
    adapters = {
        name.removeprefix("adapter."): t
        for name, t in tensors.items()
        if name.startswith("adapter.")
    }
    with policy.masters.in_place():
        if adapters:
            known = policy.model.state_dict()
            _take_over(policy.model, known | adapters, checkpoint)
        if policy.critic is not None:
            own = {
                name.removeprefix("critic."): t
                for name, t in tensors.items()
                if name.startswith("critic.")
            }
            _take_over(policy.critic, own, checkpoint)


def save_policy(policy: Policy) -> Callable[[Path], None]:
    """Writes the policy's float32 weights as a Hugging Face directory, adapters merged into
    them."""

    def save(path: Path) -> None:
        with policy.masters.in_place():
            model = policy.model
            if _is_peft(model):
                model = cast(
                    nn.Module, cast(Any, copy.deepcopy(model).to("cpu").float()).merge_and_unload()
                )
            save_pretrained(model, policy.tokenizer, path)

    return save


def save_adapter(policy: Policy) -> Callable[[Path], None] | None:
    """Writes the policy's adapter alone, as peft reads it; None where it has none."""
    if not _is_peft(policy.model):
        return None

    def save(path: Path) -> None:
        with policy.masters.in_place(), quiet():
            cast(Any, policy.model).save_pretrained(str(path), save_embedding_layers=False)

    return save


def save_pretrained(model: nn.Module, tokenizer: Any, path: Path) -> None:
    """A directory that `from_pretrained` loads."""
    path.mkdir(parents=True, exist_ok=True)
    with quiet():
        cast(Any, model).save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))


def load_stored_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


def sampling_model(policy: Policy) -> Any:
    """The module that the in-process generator samples with: the trained module itself, adapters
    included."""
    return cast(Any, policy.model).get_base_model() if _is_peft(policy.model) else policy.model


def _take_over(module: nn.Module, state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        raise CheckpointError(
            f"{checkpoint.path} holds another model than the config describes "
            f"({str(error).splitlines()[-1].strip()}); "
            "a run goes on with the model that it began with"
        ) from error


def _is_peft(model: nn.Module) -> bool:
    return type(model).__module__.startswith("peft.")
