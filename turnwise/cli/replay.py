"""`turnwise replay FILE`: replays stored episodes. The exit status says whether they match."""

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import Trust, fail, refuse_code
from turnwise.cli.sources import Source, played
from turnwise.config import Config, load_config


def register(app: typer.Typer) -> None:
    app.command("replay", epilog="Example: turnwise replay runs/NAME/episodes/step_000012.jsonl")(
        replay
    )


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            help="A JSONL file of episodes, from a run directory or `turnwise rollout`."
        ),
    ],
    episode: Annotated[str | None, typer.Option(help="Only the episode with this id.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The config. Default: the config next to the file.")
    ] = None,
    show: Annotated[bool, typer.Option(help="Print the conversation.")] = False,
    trust: Trust = False,
) -> None:
    """Replay stored episodes: exit status 0 if observations and rewards match, else 1 and the first
    difference."""
    from turnwise.log.records import RunDirectoryError
    from turnwise.procs.progress import Progress

    if not file.is_file():
        fail(
            f"there is no file {file}; episodes are in RUN/episodes or the file of `rollout --out`"
        )
    stored = _config(file, config, trust=trust)
    with Progress("loading libraries"):
        from turnwise.evaluate.replay import read_episodes, replay_episodes
    settings, factories = played(Source(config=stored), env=None)
    try:
        episodes = read_episodes(file)
    except (FileNotFoundError, RunDirectoryError, KeyError, ValueError) as error:
        fail(f"{file}: {error}")
    chosen = [one for one in episodes if episode in (None, one.id)]
    if not chosen:
        known = ", ".join(one.id for one in episodes[:5])
        fail(
            f"{file} has {len(episodes)} episodes, none with id {episode!r}; the first are {known}"
        )
    try:
        differences = replay_episodes(chosen, settings, factories=factories)
    except ValueError as error:
        fail(str(error))
    for one, difference in zip(chosen, differences, strict=True):
        if show:
            for message in one.prompt:
                print(f"[{message.role}] {message.content}")
            for turn in one.turns:
                print(f"[assistant] {turn.text}\n  reward {turn.reward:g}, action {turn.action!r}")
                for message in turn.messages:
                    print(f"[{message.role}] {message.content}")
        if difference is not None:
            print(f"DIFFERENT  {difference}")
    same = differences.count(None)
    print(
        f"{same} of {len(chosen)} episodes gave the same result, "
        f"{sum(len(one.turns) for one in chosen)} turns in all"
    )
    if same < len(chosen):
        raise typer.Exit(1)


def _config(file: Path, given: Path | None, *, trust: bool) -> Config:
    from turnwise.config.load import config_path
    from turnwise.envs.trust import is_run_config

    places = [given] if given else [config_path(file), file.resolve().parent.parent / "config.yaml"]
    for place in places:
        if place.is_file():
            found = load_config(place)
            if given is None or is_run_config(place):
                refuse_code(found, stored=place, trust=trust)
            return found
    fail(f"there is no config at {' or '.join(map(str, places))}; give --config")
