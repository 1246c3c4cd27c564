"""`turnwise eval RUN_OR_MODEL`: evaluates a player on held-out tasks, and compares it with
another."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, Trust, fail, told_shortly
from turnwise.cli.sources import Source, played, read_source
from turnwise.config import Config

if TYPE_CHECKING:
    from turnwise.evaluate.evaluation import Comparison, EvalResult, PolicyPlayer
    from turnwise.evaluate.players import Player

PLAYERS = "random, expert, openai:URL#MODEL, script:FILE.py:FUNCTION"


def register(app: typer.Typer) -> None:
    app.command(
        "eval",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RUN|CHECKPOINT|MODEL|RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise eval runs/NAME --against before",
    )(evaluate_command)


def evaluate_command(
    ctx: typer.Context,
    player: Annotated[
        str | None, typer.Option(help=f"The player, instead of the policy: {PLAYERS}.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help=(
                f"Compare on the same tasks with: before (the run's first policy), {PLAYERS}, a "
                "run, a model; thought (with --without-thought: the policy with its thoughts)."
            )
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="The environment, in place of the config's.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(help="Tasks to play. Default: eval.episodes.", min=1)
    ] = None,
    cut: Annotated[
        bool,
        typer.Option("--without-thought", help="Begin every reply after an empty thought."),
    ] = False,
    split: Annotated[str, typer.Option(help="val (held out) or train.")] = "val",
    out: Annotated[Path | None, typer.Option(help="Write the episodes to this JSONL file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Evaluate a run, a checkpoint, a model or a player: success and reward with 95 % intervals."""
    from turnwise.envs.base import EnvError
    from turnwise.procs.progress import Progress

    source = read_source(ctx.args, env=env, player=player, trust=trust)
    if split not in ("val", "train"):
        fail(f"--split is val or train, got {split!r}")
    with Progress("loading libraries"):
        from turnwise.evaluate.evaluation import EvaluationError, compare, evaluate
        from turnwise.train.checkpoint import CheckpointError
    failures = (CheckpointError, EvaluationError, EnvError)
    with told_shortly((ValueError, ImportError, OSError), failures):
        if against == "thought" and not cut:
            fail("--against thought compares with the thoughts that --without-thought cuts; add it")
        chosen = _player(player, source, trust=trust)
        whole, factories = played(source, env=env)
        config, chosen = _without_thought(whole, chosen) if cut else (whole, chosen)
        result = evaluate(config, chosen, episodes=episodes, split=split, factories=factories)
        other = None
        if against is not None:
            thinks = against == "thought"
            rival = _player(player if thinks else against, source, trust=trust)
            setting = whole if thinks else config
            other = evaluate(setting, rival, episodes=episodes, split=split, factories=factories)
    comparison = compare(result, other) if other is not None else None
    if out is not None:
        from turnwise.cli.rollout import write_episodes

        write_episodes(out, result.episodes, source.config)
    if as_json:
        print(json.dumps(_as_json(result, other, comparison), indent=2))
    else:
        for one in (result, other) if other is not None else (result,):
            print(describe(one))
        if comparison is not None:
            print(comparison.verdict())


def _without_thought(
    config: Config, player: "Player | PolicyPlayer"
) -> "tuple[Config, PolicyPlayer]":
    from dataclasses import replace

    from turnwise.evaluate.evaluation import PolicyPlayer
    from turnwise.evaluate.thoughts import without_thought

    if not isinstance(player, PolicyPlayer):
        fail(
            f"--without-thought begins the replies of a policy; those of --player {player.name} "
            "cannot be begun"
        )
    named = replace(player, name=f"{player.name} without thought")
    return without_thought(config, player.tokenizer), named


def describe(result: "EvalResult") -> str:
    """The result in one line."""
    success = "" if result.success is None else f"success {result.success}, "
    failed = f", {result.failures} failed" if result.failures else ""
    few = f" of only {result.tasks} tasks" if result.tasks < len(result.outcomes) else ""
    count = f"{len(result.outcomes)} episodes{few}{failed}"
    return f"{result.player}: {success}reward {result.reward} over {count} (95 % intervals)"


def _player(spec: str | None, source: Source, *, trust: bool) -> "Player | PolicyPlayer":
    from turnwise.evaluate.player_names import load_player
    from turnwise.train.load_policy import load_policy

    if spec is None:
        return load_policy(source.config, run=source.run, model=source.model, name=source.name)
    if spec == "before":
        return load_policy(source.config, run=source.run, first=True, name="before")
    if "/" not in spec.partition(":")[0] and not Path(spec).exists():
        return load_player(spec, source.config)
    other = read_source([spec], trust=trust)
    if source.config.model.trust_remote_code and not trust:
        fail(
            f"model.trust_remote_code is on, so code of {spec} would be loaded; add "
            "--trust to allow it"
        )
    return load_policy(source.config, run=other.run, model=other.model, name=other.name)


def _as_json(
    result: "EvalResult", other: "EvalResult | None", comparison: "Comparison | None"
) -> dict[str, object]:
    data: dict[str, object] = {"result": result.to_json()}
    if other is not None and comparison is not None:
        data["against"] = other.to_json()
        data["comparison"] = {
            "tasks": comparison.tasks,
            "only_a": comparison.only_a,
            "only_b": comparison.only_b,
            "success_p": comparison.success_p,
            "reward_p": comparison.reward_p,
            "more_tasks": comparison.more,
            "verdict": comparison.verdict(),
        }
    return data
