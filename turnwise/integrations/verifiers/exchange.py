"""A conversation that verifiers drives, as questions and answers, so that AgentProxy can play it.

verifiers asks a client for every reply. Here the client asks an `Exchange`, which hands the question to whoever steps
the environment, and the answer back: no model server is needed, and the tokens are turnwise's own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.validate import read_reward
from turnwise.procs.coroutines import run_sync
from turnwise.types import Json, Message, Observation, StepResult, Task


class CutError(Exception):
    """The rollout ended the conversation before the environment did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a conversation asks the model: everything said so far, and the tools on offer."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]


class Exchange:
    """A coroutine that asks a model, turned inside out: every question is returned, every answer passed in.

    Example:
        >>> async def play(exchange):
        ...     first = await exchange.ask([{"role": "user", "content": "1+1?"}], [])
        ...     return first.content == "2"
        >>> exchange = Exchange(play)
        >>> exchange.start().messages[0]["content"]
        '1+1?'
        >>> exchange.answer(Message(role="assistant", content="2")) is None, exchange.result
        (True, True)
    """

    def __init__(self, play: "Callable[[Exchange], Coroutine[Any, Any, Any]]") -> None:
        self._play = play
        self._task: asyncio.Task[Any] | None = None
        self._questions: asyncio.Queue[Question] | None = None
        self._reply: asyncio.Future[Message] | None = None

    async def ask(self, messages: list[dict[str, Json]], tools: list[dict[str, Json]]) -> Message:
        """The model's reply. For the coroutine's side."""
        assert self._questions is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._questions.put_nowait(Question(messages=messages, tools=tools))
        return await self._reply

    def start(self) -> Question | None:
        """The first question, or None where the coroutine ended without one."""
        return run_sync(self._start())

    def answer(self, message: Message) -> Question | None:
        """The next question, or None where the coroutine is over."""
        return run_sync(self._answer(message))

    def cut(self) -> None:
        """Answers the open question with CutError and waits for the end."""
        run_sync(self._answer(CutError("the rollout cut the episode")))

    def close(self) -> None:
        run_sync(self._cancel())

    @property
    def result(self) -> Any:
        """What the coroutine returned; raises what it raised."""
        assert self._task is not None
        return self._task.result()

    async def _start(self) -> Question | None:
        self._questions = asyncio.Queue()
        self._task = asyncio.create_task(self._play(self))
        return await self._next()

    async def _answer(self, reply: Message | Exception) -> Question | None:
        assert self._reply is not None
        if not self._reply.done():
            if isinstance(reply, Exception):
                self._reply.set_exception(reply)
            else:
                self._reply.set_result(reply)
        return await self._next()

    async def _next(self) -> Question | None:
        assert self._questions is not None
        assert self._task is not None
        question = asyncio.create_task(self._questions.get())
        await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        return None

    async def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a conversation came to."""

    reward: float | None
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str | None = None
    truncated: bool = False
    messages: Sequence[Mapping[str, Json]] = ()
    """Everything that was said, from the first message on."""


class ExchangeTurns:
    """A conversation of verifiers behind the protocol. The reward is known at the end and counts for the last turn."""

    def __init__(
        self,
        play: Callable[[Task], Callable[[Exchange], Coroutine[Any, Any, Outcome]]],
        *,
        name: str,
        limit: int | None,
    ) -> None:
        self._play = play
        self._name = name
        self._exchange: Exchange | None = None
        self._known = 0  # messages that the model has seen, its own replies included
        self.max_turns = limit

    def make_task(self, seed: int, split: str) -> Task:
        raise EnvError(f"{self._name}: tasks are the rows of its data set; there are none for seeds")

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self.close()
        self._exchange = Exchange(self._play(task))
        question = self._call("setup", self._exchange.start)
        if question is None:
            outcome = self._outcome()
            raise EnvError(
                f"{self._name}: the episode ended before the model was asked ({outcome.error or 'no reason'})"
            )
        self._known = len(question.messages)
        return Observation(
            messages=tuple(Message.from_json(message) for message in question.messages), tools=tuple(question.tools)
        )

    def step(self, message: Message) -> StepResult:
        if self._exchange is None:
            raise EnvError(f"{self._name}: step needs a running episode; call reset first")
        exchange = self._exchange
        question = self._call("step", lambda: exchange.answer(message))
        if question is None:
            return self._end()
        if len(question.messages) <= self._known:
            raise EnvError(
                f"{self._name}: it rewrote the conversation ({len(question.messages)} messages after {self._known}); "
                "only environments that add to it can be trained on here"
            )
        new = tuple(Message.from_json(item) for item in question.messages[self._known + 1 :])
        self._known = len(question.messages)
        return StepResult(messages=new, reward=0.0, action=message.content)

    def finish(self) -> StepResult:
        if self._exchange is None:
            raise EnvError(f"{self._name}: finish needs a running episode; call reset first")
        self._call("finish", self._exchange.cut)
        result = self._end()
        return StepResult(
            messages=(), reward=result.reward, truncated=True, reward_parts=result.reward_parts, info=result.info
        )

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _end(self) -> StepResult:
        outcome = self._outcome()
        if outcome.error is not None:
            raise EnvError(f"{self._name}: {outcome.error}")
        reward = read_reward(outcome.reward, name=self._name, what="its reward")
        # What is added after the last reply, such as the last tool's answer, belongs to the record.
        last = [Message.from_json(item) for item in outcome.messages[self._known + 1 :]]
        return StepResult(
            messages=tuple(last),
            reward=reward,
            terminated=not outcome.truncated,
            truncated=outcome.truncated,
            reward_parts=dict(outcome.parts) or {"env": reward},
            info={"metrics": dict(outcome.metrics)},
        )

    def _outcome(self) -> Outcome:
        assert self._exchange is not None
        exchange = self._exchange
        return self._call("scoring", lambda: exchange.result)

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvError(f"{self._name}: {what} raised {type(error).__name__}: {error}") from error
