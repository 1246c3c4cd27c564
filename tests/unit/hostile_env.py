"""An environment whose answers break the contract, by the task's payload. Worker processes load it
from this file."""

import asyncio
from typing import Any, cast

from turnwise.types import Message, Observation, StepResult, Task


class Liars:
    """Hostile answers by the task's seed, for worker processes and servers."""

    ANSWERS = (
        StepResult(messages=(), reward=1e39, terminated=True),
        StepResult(messages=(), reward=cast(Any, "1.0"), terminated=True),
        StepResult(messages=(), reward=1.0, terminated=cast(Any, "false")),
        StepResult(messages=(Message(role="user", content=cast(Any, 7)),), reward=1.0),
        StepResult(messages=(Message(role="assistant", content="I."),), reward=1.0),
        SystemExit("half \ud83c"),
        GeneratorExit(),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
        StopIteration(),
        "no result",
        StepResult(
            messages=(), reward=1.0, terminated=True, info={"n": 10**5000, "half": "\ud83c"}
        ),
    )

    max_turns = None

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"liars/{split}/{seed}", seed=seed, payload={"kind": seed}, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self.kind = int(task.payload["kind"])
        return Observation(messages=(Message(role="user", content="Go?"),))

    def step(self, message: Message) -> StepResult:
        answer = self.ANSWERS[self.kind]
        if isinstance(answer, BaseException):
            raise answer
        return cast(StepResult, answer)

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0)

    def close(self) -> None:
        pass
