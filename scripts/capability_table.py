"""Writes docs/capabilities.md: what each backend honours, according to the backend's own checks.

python scripts/capability_table.py          # writes the file
python scripts/capability_table.py --check  # fails where the file is not what the code says
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import get_args

from turnwise.algos.table import build_algorithm
from turnwise.config.load import load_config
from turnwise.config.schema import AlgorithmName, Config
from turnwise.integrations.trl.mapping import refuse as refuse_trl
from turnwise.integrations.verl.config.settings import refusals as refused_by_verl

PAGE = Path(__file__).parents[1] / "docs" / "capabilities.md"

FEATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("asymmetric and dual clip", ("algo.clip_high=0.28", "algo.dual_clip=3.0")),
    ("CISPO surrogate", ("algo.surrogate=cispo", "algo.reduction=token_mean")),
    ("sequence-level ratio", ("algo.ratio_level=sequence", "algo.reduction=sequence_mean")),
    ("token mean", ("algo.reduction=token_mean",)),
    ("KL in the loss", ("algo.kl_coef=0.1",)),
    ("KL in the loss, k1 or k2", ("algo.kl_coef=0.1", "algo.kl_form=k2")),
    ("KL in the reward", ("algo.name=reinforce_pp", "algo.kl_coef=0.1", "algo.kl_in=reward")),
    ("adaptive KL", ("algo.kl_coef=0.1", "algo.kl_target=0.05")),
    ("entropy bonus", ("algo.entropy_coef=0.01",)),
    ("truncated importance sampling", ("algo.tis_cap=2.0",)),
    ("reward-variance filter", ("algo.filter=variance_top_p", "algo.filter_keep=0.5")),
    ("dynamic sampling filter", ("algo.filter=dynamic",)),
    ("context windows", ("rollout.window=last_k", "algo.reduction=token_mean")),
    ("context windows, mean per episode", ("rollout.window=last_k", "algo.reduction=episode_mean")),
    ("rollouts that drop their slowest groups", ("rollout.enough_groups=4",)),
    ("several environments in one run", ("rollout.train.tags=[bandit, countdown]",)),
    ("single-turn training", ("train.multi_turn=false",)),
    ("LoRA", ("model.lora.rank=8",)),
    ("critic on the policy's trunk", ("algo.name=ppo", "model.critic=shared")),
    ("cosine schedule", ("train.schedule=cosine",)),
    ("linear schedule", ("train.schedule=linear",)),
    ("reward normalisation", ("env.shaping.normalize=batch",)),
    ("several mini-batches", ("train.mini_batches=2",)),
    ("several epochs", ("train.epochs=2",)),
    ("early stop by KL", ("train.target_kl=0.02",)),
    ("bit-for-bit reproducible", ("train.deterministic=true",)),
    ("arguments of a chat template", ("model.chat_template_args={enable_thinking: false}",)),
    ("stop strings", ("rollout.stop=['</answer>']",)),
)
"""What a user may want, as the settings that ask for it on top of GRPO."""
INTRODUCTION = (
    "`scripts/capability_table.py` writes this table: it gives each config to each backend's own "
    "check and records the answer. A test compares the table with the code. A backend refuses a "
    "setting that it cannot honour, by name, before it loads anything."
)
PLACES = (
    "The native backend runs on one device, TRL in the processes of one `accelerate` launch, verl "
    "on the nodes of a Ray cluster ([scale.md](scale.md)). A yes under verl means that the setting "
    "is honoured, not that it was run on every engine; scale.md says what was run."
)


def _native(config: Config) -> str | None:
    build_algorithm(config.algo)
    return None


def _trl(config: Config) -> str | None:
    refuse_trl(config)
    return None


def _verl(config: Config) -> str | None:
    found = refused_by_verl(config, engine="hf" if config.model.lora.rank == 0 else "vllm")
    return found[0] if found else None


BACKENDS: dict[str, Callable[[Config], str | None]] = {
    "native": _native,
    "TRL": _trl,
    "verl": _verl,
}


def cell(backend: str, overrides: tuple[str, ...]) -> str:
    """`yes`, or `no` with the reason that the backend itself gives."""
    config = load_config({"algo": {"name": "grpo"}}, list(overrides))
    try:
        why = BACKENDS[backend](config)
    except ValueError as error:
        why = str(error)
    return "yes" if why is None else f"no: {_reason(why)}"


def _reason(text: str) -> str:
    """The reason without the setting's name before it and the remedy behind it."""
    first = text.partition("\n")[0]
    for mark in ("cannot be honoured by backend trl: ", "cannot be honoured: "):
        first = first.rpartition(mark)[2]
    first = re.sub(r"^[\w.]+ ?= ?('[^']*'|[^\s:]+):? ?", "", first)
    return first.partition(";")[0].strip()


def page() -> str:
    rows = [
        (f"algorithm `{name}`", (f"algo.name={name}",)) for name in get_args(AlgorithmName)
    ] + list(FEATURES)
    lines = [
        "# What each backend honours",
        "",
        fill(INTRODUCTION, 100),
        "",
        "| | settings | native | TRL | verl |",
        "|---|---|---|---|---|",
    ]
    for name, overrides in rows:
        asked = " ".join(f"`{word}`" for word in overrides)
        lines.append(
            f"| {name} | {asked} | "
            + " | ".join(cell(backend, overrides) for backend in BACKENDS)
            + " |"
        )
    lines += [
        "",
        fill(PLACES, 100),
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return 0 if PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
