"""Episodes and run directories, made by hand, for tests of what reads them."""

import json
import re
from pathlib import Path
from typing import Any

from turnwise.config.schema import Config, LogConfig
from turnwise.log.store import CreditRow, RunDirectory, ledger_entry
from turnwise.types import Completion, Episode, Message, Status, Task, Turn


def make_turn(
    text: str = "up", *, reward: float = 0.0, state: str = "s", **changes: object
) -> Turn:
    ids = (*(ord(letter) for letter in text), 2)
    fields = {
        "prompt_ids": (1, 3),
        "completion": Completion(ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop"),
        "text": text,
        "restart": False,
        "action": text,
        "reward": reward,
        "state_key": state,
        **changes,
    }
    return Turn(**fields)  # pyright: ignore[reportArgumentType]


def make_episode(
    name: str = "e0",
    *,
    turns: tuple[Turn, ...] | None = None,
    group_id: int = 0,
    index: int = 0,
    success: bool | None = None,
    status: Status = Status.COMPLETED,
    task: Task | None = None,
    **changes: object,
) -> Episode:
    played = turns if turns is not None else (make_turn(),)
    if success is not None:
        info = {"success": success}
        played = (*played[:-1], make_turn(played[-1].text, reward=float(success), info=info))
    fields = {
        "id": name,
        "task": task or Task(id=f"t{group_id}", seed=group_id),
        "group_id": group_id,
        "index": index,
        "tag": "lake",
        "seed": 1,
        "noise_seed": 2,
        "prompt": (Message(role="user", content="go"),),
        "turns": played,
        "status": status,
        **changes,
    }
    return Episode(**fields)  # pyright: ignore[reportArgumentType]


def make_run(path: Path, *, config: Config | None = None, name: str = "run") -> RunDirectory:
    return RunDirectory.create(LogConfig(dir=str(path), name=name), config or Config())


def fill_step(
    run: RunDirectory, step: int, episodes: list[Episode], metrics: dict[str, float]
) -> None:
    """A whole step as a trainer writes it."""
    run.write_episodes(step, episodes)
    rows: list[CreditRow] = []
    for episode in episodes:
        turn_ids = tuple(k for k, turn in enumerate(episode.turns) for _ in turn.completion.ids)
        advantages = tuple((-1.0) ** place * (place + 1) / 4 for place in range(len(turn_ids)))
        rows.append(
            CreditRow(episode_id=episode.id, sample=0, turn_ids=turn_ids, advantages=advantages)
        )
    run.write_credit(step, rows)
    ids = [turn.completion.ids for episode in episodes for turn in episode.turns]
    run.write_ledger(ledger_entry(step, [(one, one) for one in ids]))
    run.write_metrics(step, metrics)


def page_data(page: str) -> dict[str, Any]:
    """The answers that an exported page holds, by their url."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
