"""`turnwise replay FILE`: a stored episode again. The exit status says whether it went the same way."""

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import fail
from turnwise.config import Config, load_config


def register(app: typer.Typer) -> None:
    app.command("replay")(replay)


def replay(
    file: Annotated[Path, typer.Argument(help="A JSONL file of episodes, from a run directory or `turnwise rollout`.")],
    episode: Annotated[str | None, typer.Option(help="Only the episode with this id.")] = None,
    config: Annotated[Path | None, typer.Option(help="The config; default: the one beside the file.")] = None,
    show: Annotated[bool, typer.Option(help="Print the conversation.")] = False,
) -> None:
    """Play stored episodes again: same observations and rewards (exit 0), or the first difference (exit 1)."""
    from turnwise.evaluate.replay import read_episodes, replay_episode
    from turnwise.log.records import RunDirectoryError

    settings = _config(file, config)
    try:
        episodes = read_episodes(file)
    except (FileNotFoundError, RunDirectoryError, KeyError, ValueError) as error:
        fail(f"{file}: {error}")
    chosen = [one for one in episodes if episode in (None, one.id)]
    if not chosen:
        known = ", ".join(one.id for one in episodes[:5])
        fail(f"{file} has {len(episodes)} episodes and none called {episode!r}; the first are {known}")
    different = 0
    for one in chosen:
        if show:
            for message in one.prompt:
                print(f"[{message.role}] {message.content}")
            for turn in one.turns:
                print(f"[assistant] {turn.text}\n  reward {turn.reward:g}, action {turn.action!r}")
                for message in turn.messages:
                    print(f"[{message.role}] {message.content}")
        try:
            difference = replay_episode(one, settings)
        except ValueError as error:
            fail(str(error))
        if difference is not None:
            different += 1
            print(f"DIFFERENT  {difference}")
    same = len(chosen) - different
    print(f"{same} of {len(chosen)} episodes went the same way, {sum(len(one.turns) for one in chosen)} turns in all")
    if different:
        raise typer.Exit(1)


def _config(file: Path, given: Path | None) -> Config:
    from turnwise.cli.rollout import config_path

    places = [given] if given else [config_path(file), file.resolve().parent.parent / "config.yaml"]
    for place in places:
        if place.is_file():
            return load_config(place)
    fail(f"there is no config at {' or '.join(map(str, places))}; give --config")
