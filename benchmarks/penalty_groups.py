"""Groups that differ by nothing but penalties: trained on, left out, or made rare by easier tasks.

    python benchmarks/penalty_groups.py [--seeds 0 1] [--steps 40] [--arms train drop easier both]
        [--algorithms grpo gigpo]

A room with a key and a door (key_door), in which a move into a wall is refused and costs 0.1, and
`wait` is always possible. Only the door pays. A random player hardly ever reaches it, so that at
first nearly all groups fail, and their members differ by penalties alone. Arms:

    train     such groups are trained on (algo.penalty_only_groups=train)
    drop      they have no advantage (the default)
    easier    trained on; two thirds of the training rooms may be 2 or 4 moves from the end
    both      left out, and the easier rooms

The embedded model starts from transcripts of a random player. A row is success on 512 held-out
rooms, the share of groups with penalties alone in the first five steps, and the most frequent reply
of the last step with its share.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from turnwise import train
from turnwise.envs.base import BadActionError
from turnwise.envs.games.key_door import KeyDoor

EASIER = {f"rooms{moves}": {"min_moves": moves} for moves in (2, 4, 6)}
ARMS: dict[str, dict[str, Any]] = {
    "train": {"algo.penalty_only_groups": "train"},
    "drop": {"algo.penalty_only_groups": "drop"},
    "easier": {"algo.penalty_only_groups": "train", "rollout.train.tags": [*EASIER]},
    "both": {"algo.penalty_only_groups": "drop", "rollout.train.tags": [*EASIER]},
}


class WalledRoom(KeyDoor):
    """KeyDoor, where a move that leads nowhere is refused and `wait` is always possible."""

    actions = (*KeyDoor.actions, "wait")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "wait":
            self._steps += 1
            return self.render(), 0.0, False, self._steps >= self.max_steps, {"success": False}
        before = self.render()
        found = super().step(action)
        if found[0] == before:
            raise BadActionError("That is a wall.")
        return found


def settings(arm: str, algorithm: str, seed: int, steps: int, folder: str) -> dict[str, Any]:
    """What differs from the recipe key_door."""
    env = {
        "name": f"{Path(__file__).resolve()}:WalledRoom",
        "max_turn": 12,
        "system_prompt": "Fetch K, then go to D.",
        "format": {"style": "raw", "max_actions_per_turn": 1, "reminder": "never"},
    }
    easier = {f"envs.{tag}": env | {"options": options} for tag, options in EASIER.items()}
    return {
        **{f"env.{key}": value for key, value in env.items()},
        "sft.source": [],
        "algo.name": algorithm,
        "seed": seed,
        "train.steps": steps,
        "train.max_idle_steps": steps + 1,
        "train.max_collapsed_steps": 0,
        "log.dir": folder,
        "log.report": False,
        "eval.baselines": False,
        "checkpoint.write": False,
        **easier,
        **ARMS[arm],
    }


def measure(arm: str, algorithm: str, seed: int, steps: int) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            config="key_door",
            overrides=settings(arm, algorithm, seed, steps, folder),
            quiet=True,
        )
        first = result.metrics()[1:6]
        groups = sum(row.get("group/penalty_only") or 0.0 for row in first) / (32 * len(first))
        said = [turn.text for episode in result.episodes(result.steps) for turn in episode.turns]
    top = max(set(said), key=said.count)
    before, after = (
        one.success if one is not None else None for one in (result.before, result.after)
    )
    words = [f"{algorithm:6} {arm:7} {seed:4}", f"{100 * groups:8.0f} %"]
    words += ["?" if one is None else share(one) for one in (before, after)]
    return "  ".join([*words, f"{top!r} {100 * said.count(top) / len(said):.0f} %"])


def share(success: tuple[float, float, float]) -> str:
    low, middle, high = (100 * one for one in success)
    return f"{middle:4.1f} % [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--algorithms", nargs="+", default=["grpo"])
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    options = parser.parse_args()
    print("algorithm, arm, seed; groups with penalties alone; success before, after; top reply")
    for algorithm in options.algorithms:
        for seed in options.seeds:
            for arm in options.arms:
                print(measure(arm, algorithm, seed, options.steps), flush=True)


if __name__ == "__main__":
    main()
