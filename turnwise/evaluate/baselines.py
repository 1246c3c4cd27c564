# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Baselines: what players reach who learn nothing, on the held-out tasks of an evaluation.

A policy has learned to read its observations only where it beats the best player that never looks.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from turnwise.config.schema import Config, EnvConfig, FormatConfig
from turnwise.envs.actions import write_reply
from turnwise.envs.base import Env, EnvError, hint_of
from turnwise.envs.gate import ask_within, close_quietly, words
from turnwise.envs.message_turns import MessageTurns
from turnwise.envs.registry import is_ours, make_env
from turnwise.envs.text_turns import TextTurns
from turnwise.evaluate.evaluation import EvalResult, evaluate
from turnwise.evaluate.players import Player, RandomPlayer, Situation
from turnwise.procs.threads import SideThread
from turnwise.rollout.plan import env_configs, turn_limit
from turnwise.seeding import derive_seed
from turnwise.types import Message, Task

SEARCH_TASKS = 1000
"""Training tasks on which blind plans are tried."""
BEAM = 16
"""Beginnings of plans that are kept while longer ones are tried."""
LONGEST_PLAN = 32
MOST_ACTIONS = 8
"""With more actions than this the search would be long, and no blind plan is worth much."""


@dataclass(frozen=True, slots=True)
class BlindPlan:
    """The policy of a player that ignores observations: a fixed sequence of actions, or draws with
    fixed probabilities."""

    actions: tuple[str, ...]
    chances: tuple[float, ...] | None = None
    """None: `actions` are played in order, and again from the first. Else they are drawn with these
    chances."""

    def action(self, number: int, rng: Random) -> str:
        if self.chances is None:
            return self.actions[number % len(self.actions)]
        return rng.choices(self.actions, self.chances)[0]

    def __str__(self) -> str:
        if self.chances is None:
            return " ".join(self.actions)
        return ", ".join(
            f"{a} {c:.0%}" for a, c in zip(self.actions, self.chances, strict=True) if c
        )


@dataclass(frozen=True, slots=True)
class BlindPlayer:
    """Follows a plan per environment, whatever it is shown."""

    plans: Mapping[str, tuple[BlindPlan, FormatConfig]]
    """By tag."""
    name: str = "blind"

    async def reply(self, situation: Situation) -> Message:
        plan, form = self.plans[situation.tag]
        first = situation.turn * form.max_actions_per_turn
        actions = [
            plan.action(first + number, situation.rng)
            for number in range(form.max_actions_per_turn)
        ]
        return Message(role="assistant", content=write_reply(actions, form))


class NoAdviceError(RuntimeError):
    """The expert knows no action in this state. It fails the episode, not the rollout."""


@dataclass(frozen=True, slots=True)
class ExpertPlayer:
    """Plays what the environment itself knows to be best (`BaseEnv.expert_action`). An episode in
    which it knows nothing fails: a box that was pushed into a corner, a level that is too hard."""

    name: str = "expert"

    async def reply(self, situation: Situation) -> Message:
        said = await situation.hint("expert")
        if said is None:
            raise NoAdviceError(
                f"the expert of {situation.tag!r} knows no way on after turn {situation.turn}"
                if situation.turn
                else f"environment {situation.tag!r} has no expert_action that knows this task"
            )
        return Message(role="assistant", content=said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A player and what it is, in words."""

    player: Player
    label: str
    detail: str = ""
    """Its actions, where they had to be searched for."""


def wanted(config: Config) -> bool:
    """Whether the run shows baselines. By default where the environments are turnwise's own:
    others may be slow, or have side effects."""
    asked = config.eval.baselines
    return (
        asked
        if asked is not None
        else all(is_ours(env.name) for env in env_configs(config, config.rollout.val).values())
    )


def find_baselines(config: Config) -> list[Baseline]:
    """The players that these environments allow: random, best blind, expert.

    The search for blind plans plays training tasks in this process, so it is for environments that
    would run here anyway: turnwise's own, and others under `rollout.isolation: inline`.

    Raises:
        EnvError: an environment failed.
    """
    plans: dict[str, tuple[BlindPlan, FormatConfig]] = {}
    random, experts = list[bool](), list[str | None]()
    beside = SideThread("turnwise-baselines")
    configs = env_configs(config, config.rollout.val)
    for tag, env_config in configs.items():
        env = make_env(env_config)
        try:
            here = is_ours(env_config.name) or config.rollout.isolation == "inline"
            if (
                here
                and isinstance(env, TextTurns)
                and (plan := _search(config, env_config, env)) is not None
            ):
                plans[tag] = (plan, env_config.format)
            draws, expert = ask_within(
                f"{env_config.name}: a first reset",
                lambda env=env: _advice(env),
                thread=beside,
                limit=config.rollout.reset_timeout,
            )
            random.append(draws)
            experts.append(expert)
        except EnvError:
            raise
        except (
            Exception
        ) as error:  # the search steps the environment itself, without the checks of an episode
            raise EnvError(f"{env_config.name}: {type(error).__name__}: {error}") from error
        finally:
            close_quietly(env, thread=beside, limit=config.rollout.step_timeout)
    found: list[Baseline] = []
    if all(random):
        found.append(Baseline(player=RandomPlayer(), label="random player"))
    if plans.keys() == configs.keys():
        shown = "; ".join(dict.fromkeys(str(plan) for plan, _ in plans.values()))
        found.append(
            Baseline(player=BlindPlayer(plans), label="best blind player", detail=f"plays {shown}")
        )
    if all(experts):
        names = ", ".join(dict.fromkeys(str(name) for name in experts))
        found.append(Baseline(player=ExpertPlayer(), label=names))
    return found


def play_baselines(
    config: Config, *, episodes: int | None = None
) -> Iterator[tuple[Baseline, EvalResult]]:
    """Every baseline's result on the tasks that a policy is evaluated on."""
    for baseline in find_baselines(config):
        yield baseline, evaluate(config, baseline.player, episodes=episodes)


def _advice(env: Env) -> tuple[bool, str | None]:
    """(whether the environment draws random replies, its expert in words or None), after a
    reset."""
    env.reset(env.make_task(0, "train"))
    draws = hint_of(env, "random", 0) is not None
    own = isinstance(env, TextTurns | MessageTurns)
    known = own and hint_of(env, "expert", 0) is not None
    return draws, words(env.env.expert) if own and known else None


def _search(config: Config, env_config: EnvConfig, env: TextTurns) -> BlindPlan | None:
    """The best blind plan found: a beam search over sequences, then a coarse grid of fixed
    chances."""
    actions = env.env.actions
    if not 2 <= len(actions) <= MOST_ACTIONS:
        return None
    length = turn_limit(config, env_config, env) * env_config.format.max_actions_per_turn
    length = min(length, env_config.max_actions_per_episode or length, LONGEST_PLAN)
    tasks = [
        env.make_task(derive_seed(config.seed, "baselines/task", number), "train")
        for number in range(SEARCH_TASKS)
    ]
    kept = [_Tried((), frozenset(range(len(tasks))), 0.0)]
    best = kept[0]
    for _ in range(length):
        longer = [_extend(env, tasks, one, action) for one in kept for action in actions]
        longer.sort(key=lambda one: (-one.won, -len(one.open), one.actions))
        kept = longer[:BEAM]
        best = max(best, kept[0], key=lambda one: one.won)
    found, won = BlindPlan(best.actions or (actions[0],)), best.won
    for chances in _grid(len(actions)):
        plan = BlindPlan(actions, chances)
        score = sum(_play(env, task, plan, length, number) for number, task in enumerate(tasks))
        if score > won:
            found, won = plan, score
    return found


@dataclass(frozen=True, slots=True)
class _Tried:
    """The beginning of a plan, and how it went so far."""

    actions: tuple[str, ...]
    open: frozenset[int]
    """Tasks that are not over yet."""
    won: float


def _extend(env: TextTurns, tasks: Sequence[Task], tried: _Tried, action: str) -> _Tried:
    actions = (*tried.actions, action)
    won, still = tried.won, set[int]()
    for number in tried.open:
        env.reset(tasks[number])
        result: Any = None
        for one in actions:
            result = env.env.step(one)
        if _over(result):
            won += _score(result)
        else:
            still.add(number)
    return _Tried(actions, frozenset(still), won)


def _play(env: TextTurns, task: Task, plan: BlindPlan, length: int, number: int) -> float:
    env.reset(task)
    rng = Random(derive_seed(task.seed, "baselines/blind", number))
    for index in range(length):
        result = env.env.step(plan.action(index, rng))
        if _over(result):
            return _score(result)
    return 0.0


def _over(result: Any) -> bool:
    return any(bool(flag) for flag in result[2:-1])


def _score(result: Any) -> float:
    info = result[-1]
    won = info.get("success") if isinstance(info, dict) else None
    return float(result[1] if won is None else won)


def _grid(count: int) -> Iterator[tuple[float, ...]]:
    """Chances in steps of a quarter (of a half where there are many actions), those of one action
    alone left out."""
    parts = 4 if count <= 4 else 2
    for cuts in itertools.combinations(range(parts + count - 1), count - 1):
        edges = (-1, *cuts, parts + count - 1)
        shares = tuple((b - a - 1) / parts for a, b in itertools.pairwise(edges))
        if max(shares) < 1.0:
            yield shares
