"""Runs made by hand for the page: a lake, walked better from step to step, with all that a trainer
stores about it."""

import math
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.config.schema import Config
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.evaluate.players import RandomPlayer, play_episodes
from turnwise.log.events import Evaluated
from turnwise.log.store import CreditRow, RunDirectory, ledger_entry
from turnwise.types import Completion, Episode, Message, Status, Task, Turn

MOVES = ("left", "down", "right", "up")
MAX_TURNS = 6
RESET, QUEUED = 0.1, 0.06
"""Seconds of a reset, and between the environment's answer and the next generation."""
SYSTEM = "Walk from P to G, not into O.\nActions: left, down, right, up.\nThink, then act."


@dataclass
class Words:
    """Token ids by word, and back."""

    ids: dict[str, int] = field(default_factory=dict[str, int])

    def encode(self, text: str) -> tuple[int, ...]:
        pieces = [*re.findall(r"\s?[^\s]+|\s", text), "<|end|>"]
        return tuple(self.ids.setdefault(piece, len(self.ids)) for piece in pieces)

    def piece(self, token: int) -> str:
        return list(self.ids)[token]


class LakeRun:
    """A run that can grow, step by step. It is locked, so it counts as running, until `end`.

    Args:
        skill: how fast the player learns, from 0.
        seed: 0 is a run that stores everything; others have neither entropies nor starts.
    """

    def __init__(
        self, folder: Path, name: str, *, steps: int = 20, skill: float = 0.1, seed: int = 0
    ) -> None:
        self.whole = seed == 0
        config = Config.model_validate(
            {
                "seed": seed,
                "model": {"embedded": {"warmstart_episodes": 20, "num_layers": 1}},
                "rollout": {"max_response_tokens": 4},
                "env": {
                    "name": "frozen_lake",
                    "max_turn": MAX_TURNS,
                    "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
                },
                "train": {"steps": steps, "lr": 2e-4 * (1 + seed), "max_turn": MAX_TURNS},
                "algo": {"name": "bi_level_gae" if seed == 0 else "grpo"},
            }
        )
        self.run: RunDirectory = make_run(folder, config=config, name=name)
        self.steps, self.skill = steps, skill
        self.words = Words()
        self._dice = random.Random(seed)

    def begin(self) -> None:
        """What is written before the first step."""
        self.evaluate(0)
        rows = {"random": (0.1, 0.08), "blind": (0.25, 0.24), "expert": (1.0, 1.0)}
        for player, (success, reward) in rows.items():
            name = f"baseline/{player}"
            self.run.write_metrics(0, {f"{name}_success": success, f"{name}_reward": reward})
        self.run.write_event("baseline", "the best blind player plays down down right right")

    def grow(self, step: int, *, groups: int = 8) -> None:
        """One step as a trainer writes it."""
        share = 1 - math.exp(-self.skill * step)
        episodes = [
            self.play(f"train-{step:06d}-g{group}-m{index}", group, index, share, task=100 + group)
            for group in range(groups)
            for index in range(2)
        ]
        self.run.write_episodes(step, episodes)
        self.run.write_credit(step, [self._credit(episode) for episode in episodes])
        ids = [turn.completion.ids for episode in episodes for turn in episode.turns]
        self.run.write_ledger(ledger_entry(step - 1, [(one, one) for one in ids]))
        rewards = [episode.reward for episode in episodes]
        mean = sum(rewards) / len(rewards)
        noise = self._dice.gauss
        self.run.write_metrics(
            step,
            {
                "rollout/episodes": len(episodes),
                "rollout/reward": mean,
                "rollout/success": sum(bool(one.success) for one in episodes) / len(episodes),
                "rollout/reward_std": math.sqrt(
                    sum((r - mean) ** 2 for r in rewards) / len(rewards)
                ),
                "rollout/format_valid": min(1.0, 0.6 + 0.4 * share + noise(0, 0.02)),
                "rollout/reply_tokens": 9 + noise(0, 0.4),
                "train/entropy": max(0.1, 2.4 - 1.6 * share + noise(0, 0.06)),
                "train/approx_kl": abs(0.01 + noise(0, 0.004)),
                "train/policy_loss": noise(-0.02, 0.01),
                "train/value_loss": max(0.001, 0.09 * (1 - share) + noise(0, 0.004)),
                "critic/explained_variance": share - 0.1 + noise(0, 0.05),
                "train/gap_mean": 2e-7,
                "time/rollout": 0.4 + abs(noise(0, 0.05)),
            },
        )

    def evaluate(self, step: int) -> None:
        """An evaluation of 24 held-out tasks."""
        share = 1 - math.exp(-self.skill * step)
        episodes = [
            self.play(f"val-{step:06d}-g{task}", task, 0, share, task=task, split="val")
            for task in range(24)
        ]
        self.run.write_episodes(step, episodes, split="eval")
        values = {"episodes": 24.0, "failures": 0.0}
        for name, found in self._intervals(episodes).items():
            for end, value in zip(("_low", "", "_high"), found, strict=True):
                values[f"{name}{end}"] = value
        self.run.write_metrics(step, {f"eval/{name}": value for name, value in values.items()})
        self._last = (step, episodes)

    def end(self) -> None:
        """The summary; then the run is no longer locked."""
        self.run.write_pieces(self.words.piece)
        step, episodes = self._last
        after = self._evaluated("after", step, self._intervals(episodes))
        before = self._evaluated(
            "before", 0, {"success": (0.04, 0.12, 0.31), "reward": (-0.05, 0.1, 0.25)}
        )
        baselines = [
            self._evaluated("baseline", 0, {"success": found, "reward": found}, player=player)
            for player, found in {
                "random player": (0.03, 0.1, 0.25),
                "best blind player": (0.12, 0.25, 0.45),
                "shortest path": (0.86, 1.0, 1.0),
            }.items()
        ]
        self.run.write_summary(
            {"steps": self.steps, "before": before, "after": after, "baselines": baselines}
        )
        self.run.close()

    def play(
        self, name: str, group: int, index: int, share: float, *, task: int, split: str = "train"
    ) -> Episode:
        """An episode on the lake of that task: the shortest way, or any other."""
        env = FrozenLake(size=4, random_start=True, random_goal=True)
        board = env.reset(seed=task, split=split)
        prompt = (
            Message(role="system", content=SYSTEM),
            Message(role="user", content=board),
        )
        turns: list[Turn] = []
        done = False
        reset_start = now = 1e9 + 0.04 * group + 0.08 * index
        now += RESET
        while not done and len(turns) < MAX_TURNS:
            clever = self._dice.random() < 0.35 + 0.65 * share
            best = env.expert_action() if clever else self._dice.choice(MOVES)
            clumsy = self._dice.random() > 0.75 + 0.25 * share
            where = "I see the goal" if clever else "I am not sure where the goal is"
            reply = f"{where}, so I go {best}." if clumsy else f"{where}. {best}"
            before = board
            if clumsy:
                reward, success = -0.1, False
            else:
                board, reward, done, _, info = env.step(best)
                success = bool(info["success"])
            ids = self.words.encode(reply)
            seconds = 0.02 * len(ids) * self._dice.uniform(0.7, 1.6), self._dice.uniform(0.01, 0.12)
            now += QUEUED
            turns.append(
                Turn(
                    prompt_ids=(1, 2),
                    completion=Completion(
                        ids=ids,
                        logprobs=tuple(-self._dice.expovariate(1.2 + 3 * share) for _ in ids),
                        finish_reason="stop",
                    ),
                    text=reply,
                    restart=not turns,
                    action=None if clumsy else best,
                    messages=(Message(role="user", content=board),),
                    reward=reward,
                    reward_parts={"env": max(reward, 0.0), "format": min(reward, 0.0)},
                    state_key=before,
                    info={"success": success, "valid": not clumsy},
                    generate_seconds=seconds[0],
                    env_seconds=seconds[1],
                    generate_start=now if self.whole else None,
                    env_start=now + seconds[0],
                )
            )
            now += sum(seconds)
        status = Status.COMPLETED if done else Status.TRUNCATED_TURNS
        return Episode(
            id=name,
            task=Task(id=f"frozen_lake/{split}/{task}", seed=task, split=split),
            group_id=group,
            index=index,
            tag="frozen_lake",
            seed=task,
            noise_seed=index,
            prompt=prompt,
            turns=tuple(turns),
            status=status,
            reset_start=reset_start,
            reset_seconds=RESET,
        )

    def _credit(self, episode: Episode) -> CreditRow:
        places = [
            (k, j) for k, turn in enumerate(episode.turns) for j in range(len(turn.completion.ids))
        ]
        returns = [
            sum(0.9 ** (i - k) * turn.reward for i, turn in enumerate(episode.turns) if i >= k)
            for k, _ in places
        ]
        values = [0.3 + 0.05 * k + 0.01 * j for k, j in places]
        return CreditRow(
            episode_id=episode.id,
            sample=0,
            turn_ids=tuple(k for k, _ in places),
            advantages=tuple(
                ret - value + self._dice.gauss(-0.15, 0.25)
                for ret, value in zip(returns, values, strict=True)
            ),
            values=tuple(values),
            returns=tuple(returns),
            gaps=tuple(self._dice.gauss(0, 1e-6) for _ in places),
            entropies=tuple(0.1 + 0.3 * j for _, j in places) if self.whole else (),
        )

    def _intervals(self, episodes: list[Episode]) -> dict[str, tuple[float, float, float]]:
        success = sum(bool(one.success) for one in episodes) / len(episodes)
        reward = sum(one.reward for one in episodes) / len(episodes)
        half = 1.96 * math.sqrt(max(success * (1 - success), 0.03) / len(episodes))
        return {
            "success": (max(0.0, success - half), success, min(1.0, success + half)),
            "reward": (reward - half, reward, reward + half),
        }

    def _evaluated(
        self,
        label: str,
        step: int,
        found: dict[str, tuple[float, float, float]],
        *,
        player: str = "policy",
    ) -> dict[str, object]:
        return Evaluated.from_json(
            {"label": label, "step": step, "episodes": 24, "player": player, "tasks": 24}
            | {name: list(values) for name, values in found.items()}
        ).to_json()


def lake_run(
    folder: Path, name: str, *, steps: int = 20, skill: float = 0.1, seed: int = 0
) -> None:
    """A run that has ended."""
    made = LakeRun(folder, name, steps=steps, skill=skill, seed=seed)
    made.begin()
    for step in range(1, steps + 1):
        made.grow(step)
        if step % 5 == 0:
            made.evaluate(step)
    made.run.write_event("slow_env", "the environment took longer than the model", step=steps // 2)
    made.end()


GAMES = ("game_2048", "frozen_lake", "sudoku", "rubikscube")
"""The environments of `games_run`, one in each step."""


def games_run(folder: Path, name: str = "games") -> None:
    """A run of games that draw numbers, frames, or nothing, played at random."""
    options = {"game_2048": {"max_steps": 40}, "frozen_lake": {"observation": "coordinates"}}
    with make_run(folder, name=name) as run:
        for step, env in enumerate(GAMES, start=1):
            config = Config.model_validate(
                {
                    "env": {
                        "name": env,
                        "options": options.get(env, {}),
                        "max_turn": 40 if env == "game_2048" else 3,
                        "format": {"max_actions_per_turn": 1},
                    },
                    "rollout": {"isolation": "inline"},
                }
            )
            run.write_episodes(step, play_episodes(config, RandomPlayer(), episodes=1))
            values = {"episodes": 1.0, "reward": -1.4e-17, "format_valid": 0.2}
            run.write_metrics(step, {f"rollout/{name}": value for name, value in values.items()})
        run.write_metrics(len(GAMES), {"eval/reward": 0.5})


OWNED = (
    "<script>document.currentScript.parentNode.dataset.ran='yes'; document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">"
)
ODD = "odd <b>&'\" names, 100%"


def odd_run(folder: Path, name: str = ODD) -> None:
    """A stopped run whose every text is hostile, with several contexts, roles and tools."""
    with make_run(folder, name=name) as run:
        for step in (1, 2):
            statuses = (Status.COMPLETED, Status.ENV_ERROR, Status.TRUNCATED_LENGTH)
            episodes = [
                make_episode(
                    f"{step}-{place} {OWNED}",
                    index=place,
                    status=status,
                    error=f"it broke {OWNED}" if status.failed else None,
                    turns=tuple(_odd_turn(place) for place in range(8)),
                )
                for place, status in enumerate(statuses)
            ]
            fill_step(run, step, episodes, {"rollout/reward": step / 5, f"odd/{OWNED}": 1.0})
        run.write_event("odd", OWNED, step=2)
        run.write_pieces(lambda token: chr(token) if token > 2 else "<end>")


def _odd_turn(place: int) -> Turn:
    message = Message(
        role="tool", name="search", content=f"{OWNED}\n{'long ' * (1200 if place == 2 else 1)}"
    )
    return make_turn(
        f"turn {place} {OWNED}" if place == 1 else f"turn {place}",
        reward=(0.5, 0.0, -0.2)[place % 3],
        restart=place in (0, 3),
        parent=1 if place == 6 else None,
        role="planner" if place % 2 else "worker",
        trained=bool(place % 2),
        messages=(message,),
        info={"said": OWNED},
    )
