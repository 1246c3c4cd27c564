"""`turnwise play NAME`: a person plays an environment in the terminal."""

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, split_source
from turnwise.config import load_config

if TYPE_CHECKING:
    from turnwise.envs.base import Env
    from turnwise.types import StepResult

ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}


def register(app: typer.Typer) -> None:
    app.command("play", context_settings=TAKES_OVERRIDES)(play)


def play(
    ctx: typer.Context,
    seed: Annotated[int, typer.Option(help="Which task.", min=0)] = 0,
    split: Annotated[str, typer.Option(help="train or val.")] = "train",
    as_model: Annotated[
        bool, typer.Option("--as-model", help="Type whole replies, in the form asked of a model.")
    ] = False,
) -> None:
    """Play an environment yourself: turnwise play frozen_lake --env.options.size 4. q gives up."""
    from turnwise.envs.registry import UnknownEnvError, make_env

    name, overrides = split_source(ctx.args)
    if name is None:
        fail("name an environment, as in `turnwise play frozen_lake`; `turnwise envs` lists them")
    config = load_config({"env": {"name": name}}, overrides)
    try:
        env = make_env(config.env, max_turn=config.env.max_turn or 1000)
    except (UnknownEnvError, ImportError, ValueError) as error:
        fail(str(error))
    try:
        play_game(env, seed=seed, split=split, as_model=as_model)
    finally:
        env.close()


def play_game(env: "Env", *, seed: int, split: str, as_model: bool) -> None:
    """One game on standard input and output."""
    from turnwise.types import Message

    opening = env.reset(env.make_task(seed, split), noise_seed=seed)
    for message in opening.messages:
        print(f"[{message.role}]\n{message.content}\n")
    total, turns = 0.0, 0
    while True:
        said = _ask(env, as_model=as_model)
        if said is None:
            print(f"\ngiven up after {turns} turns, reward {total:g}")
            return
        result = env.step(Message(role="assistant", content=said))
        turns += 1
        total += result.reward
        for message in result.messages:
            print(f"\n{message.content}")
        print(_facts(result))
        if result.done:
            success = result.info.get("success")
            word = "" if success is None else " You won." if success else " You lost."
            print(f"\nover after {turns} turns, reward {total:g}.{word}")
            return


def _ask(env: "Env", *, as_model: bool) -> str | None:
    """The reply, written as a model would have to; None to give up."""
    from turnwise.envs.actions import write_reply
    from turnwise.envs.adapt import TextTurns

    actions = tuple(env.env.actions) if isinstance(env, TextTurns) else ()
    if as_model or not isinstance(env, TextTurns):
        text = _line("your reply> ")
        return None if text in (None, "q") else text
    by_key = {action.casefold(): action for action in actions}
    arrows = sys.stdin.isatty() and bool(set(ARROWS.values()) & by_key.keys())
    if arrows:
        print("arrow keys (q gives up) ", end="", flush=True)
        while True:
            key = _key()
            if key in ("q", "\x03", "\x04", ""):
                return None
            if ARROWS.get(key, "") in by_key:
                action = by_key[ARROWS[key]]
                print(action)
                return write_reply([action], env.config.format)
    text = _line(f"{_choices(actions)}> ")
    if text is None or text == "q":
        return None
    numbered = text.isdigit() and bool(actions) and int(text) < len(actions)
    pieces = [actions[int(text)]] if numbered else [piece.strip() for piece in text.split(env.config.format.action_sep)]
    return write_reply(pieces, env.config.format)


def _choices(actions: Sequence[str]) -> str:
    if not actions or len(actions) > 20:
        return "your action"
    return ", ".join(f"{index} {action}" for index, action in enumerate(actions))


def _facts(result: "StepResult") -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward_parts.items() if value)
    return f"(reward {result.reward:g}{': ' + parts if parts else ''})"


def _line(prompt: str) -> str | None:
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _key() -> str:
    """One key press; an arrow key sends three characters at once, the escape key only the first of them."""
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
        tty.setcbreak(descriptor, termios.TCSADRAIN)  # keeps what was typed ahead
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
