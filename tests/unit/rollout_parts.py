"""Environments and scripts that the rollout tests share. They speak the internal protocol, with
nothing in between."""

from collections.abc import Callable
from typing import Any

from turnwise.config.schema import Config, GroupsConfig, RolloutConfig, TrainConfig
from turnwise.envs.base import EnvError
from turnwise.generate.base import Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Observation, StepResult, Task


class CountEnv:
    """Wants `goal` turns; pays 1 for a reply of "go". The task's seed is in the opening, the noise
    in the replies."""

    def __init__(self, goal: int = 3, *, max_turns: int | None = None) -> None:
        self.goal = goal
        self._max_turns = max_turns
        self.count = 0
        self.noise = 0
        self.done = True
        self.closed = 0

    @property
    def max_turns(self) -> int | None:
        return self._max_turns

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"count/{split}/{seed}", seed=seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self.count, self.noise, self.done = 0, noise_seed, False
        system = Message(role="system", content="Count.")
        return Observation(
            messages=(system, Message(role="user", content=f"Task {task.seed % 1000}"))
        )

    def step(self, message: Message) -> StepResult:
        if self.done:
            raise EnvError("the episode is over: reset first")
        self.count += 1
        self.done = self.count >= self.goal
        reward = float(message.content == "go")
        reply = Message(
            role="user", content=f"{self.count} of {self.goal}, noise {self.noise % 10}"
        )
        return StepResult(
            messages=(reply,),
            reward=reward,
            terminated=self.done,
            action=message.content,
            reward_parts={"env": reward},
            info={"success": self.done},
        )

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.25, reward_parts={"finish": 0.25})

    def close(self) -> None:
        self.closed += 1


class Faulty(CountEnv):
    """Does `fault` instead of its second step, the first `times` times, counted over all instances
    of one `counter`."""

    def __init__(
        self, fault: Callable[[], Any], counter: list[int], *, times: int = 1_000_000
    ) -> None:
        super().__init__()
        self._fault = fault
        self._counter = counter
        self._times = times

    def step(self, message: Message) -> StepResult:
        if self.count == 1 and self._counter[0] < self._times:
            self._counter[0] += 1
            return self._fault()
        return super().step(message)


def raises() -> StepResult:
    raise RuntimeError("the environment broke")


def config_for(
    *,
    groups: int = 2,
    size: int = 2,
    max_turn: int = 5,
    tags: tuple[str, ...] = ("count",),
    **rollout: Any,
) -> Config:
    shape = GroupsConfig(env_groups=groups, group_size=size, tags=tags)
    settings: dict[str, Any] = {"isolation": "inline", "max_response_tokens": 32, **rollout}
    return Config(
        rollout=RolloutConfig(train=shape, val=shape, **settings),
        train=TrainConfig(max_turn=max_turn),
    )


def says(text: str | Callable[[Session, int], str] = "go", **options: Any) -> ScriptedGenerator:
    """A generator that answers every turn with `text` and the end-of-turn token."""
    tokenizer = tiny_tokenizer()

    def script(session: Session, ids: tuple[int, ...], call: int) -> str:
        return text if isinstance(text, str) else text(session, call)

    return ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id, **options)
