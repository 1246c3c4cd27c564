"""`turnwise play NAME`: a person plays an environment in the terminal."""

import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, split_source, told_shortly
from turnwise.config import Config, load_config

if TYPE_CHECKING:
    from turnwise.config.schema import FormatConfig
    from turnwise.evaluate.players import Situation
    from turnwise.types import Episode, Message, Turn

ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}


def register(app: typer.Typer) -> None:
    app.command(
        "play",
        context_settings=TAKES_OVERRIDES,
        options_metavar="ENVIRONMENT [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise play frozen_lake env.options.size=4",
    )(play)


def play(
    ctx: typer.Context,
    seed: Annotated[int, typer.Option(help="Which task.", min=0)] = 0,
    split: Annotated[str, typer.Option(help="train or val.")] = "train",
    as_model: Annotated[
        bool,
        typer.Option("--as-model", help="Type whole replies, in the format required of a model."),
    ] = False,
) -> None:
    """Play an environment yourself: turnwise play frozen_lake --env.options.size 4. q quits."""
    from turnwise.envs.base import EnvError

    name, overrides = split_source(ctx.args)
    if name is None:
        fail("name an environment, as in `turnwise play frozen_lake`; `turnwise envs` lists them")
    config = load_config({"env": {"name": name}}, overrides)
    with told_shortly((ImportError, ValueError), (EnvError,)):
        episode = play_game(config, seed=seed, split=split, as_model=as_model)
    if episode is not None and episode.status.failed:
        print(f"error: {episode.status.value}: {episode.error}", file=sys.stderr)
        raise typer.Exit(1)


class GaveUp(Exception):
    """The person quit the game."""


@dataclass(frozen=True, slots=True)
class Person:
    """A player at the keyboard: prints every message and reads every reply."""

    form: "FormatConfig"
    as_model: bool
    name: str = "person"

    async def reply(self, situation: "Situation") -> "Message":
        from turnwise.evaluate.person import written_call
        from turnwise.rollout.speakers import PlayerError
        from turnwise.types import Message

        if situation.last is None:
            for message in situation.messages:
                print(f"[{message.role}]\n{message.content}\n")
            show_tools(situation.tools)
        else:
            show_turn(situation.last)
        if (board := await drawn(situation)) is not None:
            print(f"\n{board}")
        said = _ask(await situation.hint("actions"), self.form, as_model=self.as_model)
        if said is not None and not self.as_model:
            said = written_call(said, situation.tools)
        if said is None:
            raise PlayerError("quit") from GaveUp(f"quit after {situation.turn} turns")
        return Message(role="assistant", content=said)


async def drawn(situation: "Situation") -> str | None:
    """What the environment's `render` draws beyond its last observation; None where there is
    nothing to add. A drawing that fails ends no game."""
    from turnwise.envs.base import EnvError

    try:
        board = await situation.hint("board")
    except EnvError as error:
        return f"(render failed: {error})"
    seen = situation.last.messages if situation.last is not None else situation.messages
    said = " ".join(" ".join(message.content.split()) for message in seen)
    return board if isinstance(board, str) and " ".join(board.split()) not in said else None


def play_game(config: Config, *, seed: int, split: str, as_model: bool) -> "Episode | None":
    """One game on standard input and output; None if the person quit."""
    from turnwise.procs.progress import Progress

    with Progress("loading libraries"):
        from turnwise.envs.base import EnvError
        from turnwise.evaluate.players import PlayerSpeaker
        from turnwise.rollout.plan import EpisodePlan
        from turnwise.rollout.proxy import AgentProxy
        from turnwise.rollout.speakers import PlayerError

    env = config.env.model_copy(update={"max_turn": config.env.max_turn or 1000})
    rollout = config.rollout.model_copy(
        update={"retries": 0}
    )  # a retry would ask for all replies again
    config = config.model_copy(update={"env": env, "rollout": rollout})
    proxy = AgentProxy(config, split=split, speaker=PlayerSpeaker(Person(env.format, as_model)))
    try:
        ((tag, probe),) = proxy.env_state.probes.items()
        limit = min(limit for limit in (env.max_turn, probe.max_turns) if limit is not None)
        task, error = proxy.env_state.task(tag, seed, step=0)
        if error is not None:
            raise EnvError(error)
        plan = EpisodePlan(
            env_id=0,
            group_id=0,
            index=0,
            tag=tag,
            task=task,
            seed=seed,
            noise_seed=seed,
            episode_id="play",
            max_turn=limit,
        )
        (episode,) = proxy.play_these([plan], progress=False)
    except PlayerError as error:
        if not isinstance(error.__cause__, GaveUp):
            raise
        print(f"\n{error.__cause__}")
        return None
    finally:
        proxy.close()
    if not episode.status.failed:
        show_turn(episode.turns[-1])
        success = episode.turns[-1].info.get("success")
        word = "" if success is None else " You won." if success else " You lost."
        print(f"\nover after {len(episode.turns)} turns, reward {episode.reward:g}.{word}")
    return episode


def show_tools(tools: "Sequence[Mapping[str, Any]]") -> None:
    """Prints the tools, one per line, and how to call one."""
    if not tools:
        return
    print("[tools]")
    for tool in tools:
        function = tool["function"]
        properties = function.get("parameters", {}).get("properties", {})
        arguments = ", ".join(f"{name}: {_kind(schema)}" for name, schema in properties.items())
        print(f"  {function['name']}({arguments})  {function.get('description', '')}".rstrip())
    print('Call one as in: NAME ARGUMENT=VALUE ..., or NAME {"ARGUMENT": VALUE}\n')


def _kind(schema: "Mapping[str, Any]") -> str:
    return (
        "|".join(map(str, schema["enum"])) if "enum" in schema else str(schema.get("type", "any"))
    )


def show_turn(turn: "Turn") -> None:
    """Prints the messages and the reward of a turn."""
    for message in turn.messages:
        print(f"\n{message.content}")
    parts = ", ".join(f"{name} {value:g}" for name, value in turn.reward_parts.items() if value)
    print(f"(reward {turn.reward:g}{': ' + parts if parts else ''})")


def _ask(actions: Sequence[str] | None, form: "FormatConfig", *, as_model: bool) -> str | None:
    """The reply, in the format required of a model; None to quit.

    Args:
        actions: the legal actions; empty if any text is legal, None if the environment does not
            list actions.
    """
    from turnwise.envs.actions import write_reply
    from turnwise.evaluate.person import write_actions

    if as_model or actions is None:
        text = _line("your reply> ")
        return None if text in (None, "q") else text
    by_key = {action.casefold(): action for action in actions}
    arrows = sys.stdin.isatty() and bool(set(ARROWS.values()) & by_key.keys())
    if arrows:
        print("arrow keys (q quits) ", end="", flush=True)
        while True:
            key = _key()
            if key in ("q", "\x03", "\x04", ""):
                return None
            if ARROWS.get(key, "") in by_key:
                action = by_key[ARROWS[key]]
                print(action)
                return write_reply([action], form)
    text = _line(f"{_choices(actions)}> ")
    if text is None or text == "q":
        return None
    numbered = text.isdigit() and not _are_numbers(actions) and int(text) < len(actions)
    return write_actions(actions[int(text)] if numbered else text, form)


def _choices(actions: Sequence[str]) -> str:
    if not actions or len(actions) > 20:
        return "your action"
    if _are_numbers(actions):
        return ", ".join(actions)
    return ", ".join(f"{index} {action}" for index, action in enumerate(actions))


def _are_numbers(actions: Sequence[str]) -> bool:
    """True if a typed number may be an action itself, so it cannot be an index."""
    return any(action.strip().isdigit() for action in actions)


def _line(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _key() -> str:
    """One key press. An arrow key sends three characters at once, the escape key only the first."""
    import os
    import select

    descriptor = sys.stdin.fileno()
    with _raw_terminal(descriptor):
        key = os.read(descriptor, 1).decode(errors="replace")
        if key == "\x1b" and select.select([descriptor], [], [], 0.1)[0]:
            key += os.read(descriptor, 2).decode(errors="replace")
        return key


@contextlib.contextmanager
def _raw_terminal(descriptor: int) -> Generator[None]:
    import termios
    import tty

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # keeps input typed ahead
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
