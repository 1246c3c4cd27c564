"""An episode played back turn by turn."""

import math
from dataclasses import dataclass, replace

from turnwise.log.terminal.text import clean, one_line
from turnwise.types import Episode, Message, Turn

SECONDS_PER_TURN = 1.2
"""How long one turn is shown."""
MOST_SCENES = 400
MOST_EARLIER = 6
"""Turns before this one that are named."""
USUAL_WIDTH = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One turn: what the model read, and what it said. All text is clean."""

    title: str
    turn: int
    """Counted from 1; above `turns` at the end of the episode."""
    turns: int
    sees: str
    says: str
    outcome: str
    """The action and its reward; at the end, how the episode went."""
    reward: float
    earlier: tuple[str, ...] = ()
    """The turns before, in a line each, the newest first."""
    rows: int = 0
    """Lines that the largest scene of the episode takes, about."""


def scenes(episode: Episode, *, step: int | None) -> list[Scene]:
    """The episode as scenes: its turns, and its end.

    Example:
        >>> from turnwise.types import Completion, Status, Task
        >>> done = Completion(ids=(7,), logprobs=(-1.0,), finish_reason="stop")
        >>> turn = Turn(prompt_ids=(1,), completion=done, text="up", restart=True, action="up",
        ...             reward=1.0, messages=(Message(role="user", content="at the goal"),))
        >>> episode = Episode(
        ...     id="g0/m0", task=Task(id="t", seed=1), group_id=0, index=0, tag="lake", seed=9,
        ...     noise_seed=8, prompt=(Message(role="user", content="P _ G"),), turns=(turn,),
        ...     status=Status.COMPLETED)
        >>> [(scene.sees, scene.says, scene.outcome) for scene in scenes(episode, step=3)]
        [('P _ G', 'up', 'action up, reward 1'), ('at the goal', 'up', 'completed, reward 1')]
    """
    title = one_line(episode.id, most=60)
    if step is not None and not title.startswith(f"step{step - 1}/"):
        title = f"{title}, step {step}"
    shown = episode.turns[:MOST_SCENES]
    found: list[Scene] = []
    sees = _read(_newest(episode.prompt))
    for number, turn in enumerate(shown, start=1):
        says = clean(turn.text)
        before = (f"{number - 1}. {one_line(found[-1].says)}",) if found else ()
        found.append(
            Scene(
                title=title,
                turn=number,
                turns=len(episode.turns),
                sees=sees,
                says=says,
                outcome=_outcome(turn),
                reward=turn.reward,
                earlier=(before + found[-1].earlier)[:MOST_EARLIER] if found else (),
            )
        )
        if turn.rewritten is not None:
            sees = _read(_newest(turn.rewritten.messages))
        elif turn.messages:
            sees = _read(turn.messages)
    if episode.success is not None:
        ended = "success" if episode.success else "no success"
    else:
        ended = episode.status.value.replace("_", " ")
    if episode.error:
        ended = f"{ended}: {one_line(episode.error, most=200)}"
    end = Scene(
        title=title,
        turn=len(episode.turns) + 1,
        turns=len(episode.turns),
        sees=sees,
        says=found[-1].says if found else "",
        outcome=f"{ended}, reward {episode.reward:g}",
        reward=episode.reward,
        earlier=found[-1].earlier if found else (),
    )
    rows = max(_rows(scene) for scene in (*found, end))
    return [replace(scene, rows=rows) for scene in (*found, end)]


class Playback:
    """Which scene is shown now. An episode is played to its end before the next one is taken.

    Example:
        >>> player = Playback()
        >>> player.scene(0.0) is None
        True
    """

    def __init__(self, *, seconds: float = SECONDS_PER_TURN) -> None:
        self._seconds = seconds
        self._scenes: list[Scene] = []
        self._next: tuple[Episode, int | None] | None = None
        self._place = 0
        self._since = -math.inf
        self.paused = False

    def offer(self, episode: Episode, *, step: int | None) -> None:
        """The newest episode. It begins when the one that is shown has ended."""
        if episode.turns:
            self._next = episode, step

    def scene(self, now: float) -> Scene | None:
        """The scene of this moment, in seconds of any clock; None before the first episode."""
        if not self._scenes:
            self._begin(now)
        elif not self.paused and now - self._since >= self._seconds:
            if self._place + 1 < len(self._scenes):
                self._place, self._since = self._place + 1, now
            elif now - self._since >= 2 * self._seconds:  # the end is shown for twice as long
                self._begin(now)
        return self._scenes[self._place] if self._scenes else None

    def last(self) -> Scene | None:
        """The end of the newest episode."""
        newest = self._scenes if self._next is None else scenes(self._next[0], step=self._next[1])
        return newest[-1] if newest else None

    def turn_by(self, turns: int) -> None:
        """Pauses, and goes so many turns on or back."""
        self.paused = True
        self._place = min(max(self._place + turns, 0), max(len(self._scenes) - 1, 0))

    def _begin(self, now: float) -> None:
        if self._next is not None:
            (episode, step), self._next = self._next, None
            self._scenes = scenes(episode, step=step)
        self._place, self._since = 0, now


def _newest(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The message that a turn answers: the last that is no instruction."""
    others = [message for message in messages if message.role != "system"]
    return tuple(others[-1:] or messages[-1:])


def _read(messages: tuple[Message, ...]) -> str:
    parts = [
        f"[{one_line(message.name or message.role, most=40)}] {clean(message.content)}"
        if message.role == "tool"
        else clean(message.content)
        for message in messages
    ]
    return "\n".join(part for part in parts if part)


def _rows(scene: Scene) -> int:
    """Lines that a scene takes in panes of usual width."""
    sees, says = (
        sum(1 + len(line) // USUAL_WIDTH for line in text.split("\n"))
        for text in (scene.sees, scene.says)
    )
    return max(sees, says + 1 + len(scene.earlier))


def _outcome(turn: Turn) -> str:
    action = "no action" if turn.action is None else f"action {one_line(turn.action, most=80)}"
    return f"{action}, reward {turn.reward:g}"
