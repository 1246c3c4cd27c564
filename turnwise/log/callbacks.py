"""Callback: a user's own code, called per turn, episode, step, evaluation and checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from turnwise.log.events import (
    CheckpointSaved,
    EpisodeDone,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    StepDone,
    TurnDone,
)
from turnwise.types import Episode, Turn
from turnwise.user_code import find_part, line_of


class StopTraining(Exception):
    """Raised in `on_step`: the run ends after this step, as after its last one."""


class CallbackError(RuntimeError):
    """A user's callback raised; the message names the method, and the file and line."""


class Callback:
    """Override what you need; the rest does nothing. What a callback raises ends the run.

    Turns and episodes are those of training. In a notebook they are told from another thread.

    Example:
        >>> class Patience(Callback):
        ...     def on_step(self, step, metrics):
        ...         if metrics.get("rollout/success", 0.0) > 0.99:
        ...             raise StopTraining("solved")
    """

    def on_start(self, run: RunStarted) -> None:
        """Everything is loaded; the first step comes next."""

    def on_turn(self, turn: Turn, *, episode_id: str, index: int) -> None:
        """A turn was played: the `index`-th of its episode. A retried episode begins again at 0."""

    def on_episode(self, episode: Episode) -> None:
        """An episode of a training step is over, failed ones included."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done, the `step`-th."""

    def on_evaluation(self, result: Evaluated) -> None:
        """Held-out tasks were played by the policy or by a baseline."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint is on the disk."""

    def on_end(self, run: RunEnded) -> None:
        """The run is over, was interrupted, or failed."""


_METHODS: dict[type, str] = {
    RunStarted: "on_start",
    TurnDone: "on_turn",
    EpisodeDone: "on_episode",
    StepDone: "on_step",
    Evaluated: "on_evaluation",
    CheckpointSaved: "on_checkpoint",
    RunEnded: "on_end",
}


class CallbackSink:
    """A callback as one of those who hear of a run."""

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        own = type(callback)
        self.hears_turns = own.on_turn is not Callback.on_turn
        self.hears_episodes = own.on_episode is not Callback.on_episode

    def handle(self, event: Event) -> None:
        try:
            self._tell(event)
        except StopTraining:
            raise
        except Exception as error:
            raise CallbackError(
                f"callback {type(self.callback).__name__}: {_METHODS[type(event)]} raised "
                f"{type(error).__name__}: {error}{line_of(error)}"
            ) from error

    def _tell(self, event: Event) -> None:
        to = self.callback
        match event:
            case RunStarted():
                to.on_start(event)
            case TurnDone():
                to.on_turn(event.turn, episode_id=event.episode_id, index=event.index)
            case EpisodeDone():
                to.on_episode(event.episode)
            case StepDone():
                to.on_step(event.step, event.metrics)
            case Evaluated():
                to.on_evaluation(event)
            case CheckpointSaved():
                to.on_checkpoint(event.path, event.step)
            case RunEnded():
                to.on_end(event)
            case _:
                pass

    def close(self) -> None:
        """Nothing to release: a callback that holds something releases it in `on_end`."""


def callback_sinks(callbacks: object) -> list[CallbackSink]:
    """The callbacks as sinks: one or several objects, classes, or names (registered, or
    file.py:Class).

    Raises:
        ValueError: one of them is no callback.
    """
    several: Iterable[object] = (callbacks,)
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, Callback | type | str):
        several = cast("Iterable[object]", callbacks)
    found: list[CallbackSink] = []
    for given in several:
        part = find_part("callback", given) if isinstance(given, str) else given
        made = part() if isinstance(part, type) else part
        if not isinstance(made, Callback):
            raise ValueError(f"{given!r} is no callback: derive its class from turnwise.Callback")
        found.append(CallbackSink(made))
    return found
