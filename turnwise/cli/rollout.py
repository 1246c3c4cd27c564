"""`turnwise rollout`: plays episodes into a JSONL file, without training."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, Trust, fail, told_shortly
from turnwise.cli.sources import played, read_source
from turnwise.config import Config, show_config
from turnwise.config.known import remember
from turnwise.config.load import config_path

if TYPE_CHECKING:
    from turnwise.types import Episode


def register(app: typer.Typer) -> None:
    app.command(
        "rollout",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RUN|CHECKPOINT|MODEL|RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise rollout --env frozen_lake --player random --episodes 8",
    )(rollout)


def rollout(
    ctx: typer.Context,
    out: Annotated[
        Path, typer.Option(help="The JSONL file; its config is written next to it.")
    ] = Path("episodes.jsonl"),
    player: Annotated[
        str | None,
        typer.Option(
            help=(
                "The player, instead of the policy: random, expert, openai:URL#MODEL, "
                "script:FILE.py:FUNCTION."
            )
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="The environment, in place of the config's.")
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            help="Number of tasks, each played once. Default: the groups of rollout.train or .val.",
            min=1,
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="train or val.")] = "train",
    step: Annotated[int, typer.Option(help="Which training step's tasks.", min=0)] = 0,
    trust: Trust = False,
) -> None:
    """Play episodes of a recipe, config, run or model and store them, one JSON object per line."""
    from turnwise.envs.base import EnvError
    from turnwise.procs.progress import Progress

    source = read_source(ctx.args, env=env, player=player, trust=trust)
    if split not in ("val", "train"):
        fail(f"--split is train or val, got {split!r}")
    with Progress("loading libraries"):
        from turnwise.evaluate.player_names import load_player
        from turnwise.evaluate.players import play_episodes, with_episodes
        from turnwise.log.metrics import rollout_metrics
        from turnwise.rollout.proxy import AgentProxy, RolloutError
        from turnwise.train.checkpoint import CheckpointError
        from turnwise.train.load_policy import load_policy
    failures = (CheckpointError, RolloutError, EnvError)
    with told_shortly((ValueError, ImportError, OSError), failures):
        config, factories = played(source, env=env)
        if episodes is not None:
            config = with_episodes(config, episodes, split=split)
        groups = config.rollout.train if split == "train" else config.rollout.val
        if player is not None:
            who = load_player(player, config)
            count = groups.env_groups * groups.group_size if episodes is None else episodes
            found = play_episodes(
                config, who, episodes=count, split=split, step=step, factories=factories
            )
        else:
            policy = load_policy(config, run=source.run, model=source.model, name=source.name)
            proxy = AgentProxy(
                config, policy.generator, policy.tokenizer, split=split, factories=factories
            )
            try:
                result = proxy.play(step)
            finally:
                proxy.close()
            found = [*result.episodes, *result.dropped]
    write_episodes(out, found, config)
    for name, value in rollout_metrics(found).items():
        if name.count("/") == 1:
            print(f"{name.removeprefix('rollout/'):<22} {value:.4g}")
    print(f"{len(found)} episodes in {out}; replay them with `turnwise replay {out}`")
    if found and all(one.status.failed for one in found):
        print(f"error: every episode failed; the first: {found[0].error}", file=sys.stderr)
        raise typer.Exit(1)


def write_episodes(path: Path, episodes: "Iterable[Episode]", config: Config) -> None:
    """Stores the episodes, and next to them the config that replays them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(episode.to_line() + "\n")
    text = show_config(config)
    config_path(path).write_text(text, encoding="utf-8")
    remember(text)
