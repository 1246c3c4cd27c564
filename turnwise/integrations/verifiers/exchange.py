"""A conversation that verifiers drives, as questions and answers, so that AgentProxy can play it.

verifiers asks a client for every reply. Here the client asks an `Exchange`, which passes
the question to the rollout and the answer back: no model server is needed, and the tokens are
turnwise's own.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_reward
from turnwise.procs.coroutines import run_sync
from turnwise.types import Json, Message, Observation, StepResult, Task

MAX_CUTS = 64
"""Further questions that are refused after a cut, before the conversation is given up."""


class CutError(Exception):
    """The rollout ended the conversation before the environment did."""


def text_only(content: Any, *, where: str) -> str:
    """The text of a message's content.

    Raises:
        EnvError: it holds something else, such as an image.

    Example:
        >>> text_only([{"type": "text", "text": "Look: "}, {"type": "text", "text": "a"}], where="")
        'Look: a'
    """
    if not isinstance(content, list):
        return content or ""
    parts = cast(list[Mapping[str, Any]], content)
    for part in parts:
        if part.get("type") != "text":
            raise EnvError(
                f"{where} holds a part of type {part.get('type')!r}; turnwise trains on text alone"
            )
    return "".join(part.get("text", "") for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A request to the model: the messages so far, and the available tools."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]
    seat: Mapping[str, Json]
    """Which of the environment's agents asks; facts for the turn's `info`."""
    reply: "asyncio.Future[Message]"


class Exchange:
    """A coroutine that asks a model, turned inside out: every question is returned, every answer
    passed in. Questions that are asked side by side are returned one after the other.

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
        self._open: Question | None = None

    async def ask(
        self,
        messages: list[dict[str, Json]],
        tools: list[dict[str, Json]],
        seat: Mapping[str, Json] | None = None,
    ) -> Message:
        """The model's reply. For the coroutine's side."""
        assert self._questions is not None
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        question = Question(messages=messages, tools=tools, seat=seat or {}, reply=reply)
        self._questions.put_nowait(question)
        return await reply

    def start(self) -> Question | None:
        """The first question, or None where the coroutine ended without one."""
        return run_sync(self._start())

    def answer(self, message: Message) -> Question | None:
        """The next question, or None where the coroutine is over."""
        return run_sync(self._answer(message))

    def cut(self) -> None:
        """Answers the open question and all later ones with CutError, and waits for the end."""
        for _ in range(MAX_CUTS):
            if run_sync(self._answer(CutError("the rollout cut the episode"))) is None:
                return
        raise EnvError(f"it asked {MAX_CUTS} more questions after the episode was cut")

    def close(self) -> None:
        run_sync(self._cancel())

    @property
    def result(self) -> Any:
        """The result of the coroutine; raises its exception."""
        assert self._task is not None
        return self._task.result()

    async def _start(self) -> Question | None:
        self._questions = asyncio.Queue()
        self._task = asyncio.create_task(self._play(self))
        return await self._next()

    async def _answer(self, reply: Message | Exception) -> Question | None:
        assert self._open is not None
        if not self._open.reply.done():
            if isinstance(reply, Exception):
                self._open.reply.set_exception(reply)
            else:
                self._open.reply.set_result(reply)
        return await self._next()

    async def _next(self) -> Question | None:
        assert self._questions is not None
        assert self._task is not None
        question = asyncio.create_task(self._questions.get())
        await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            self._open = question.result()
            return self._open
        question.cancel()
        return None

    async def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a conversation."""

    reward: float | None
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str | None = None
    truncated: bool = False
    messages: Sequence[Mapping[str, Json]] = ()
    """Everything that was said, from the first message on."""
    info: Mapping[str, Json] | None = None
    """Further facts for the last turn."""


class ExchangeTurns:
    """A conversation of verifiers behind the protocol. The reward is known at the end and counts
    for the last turn.

    verifiers shows the whole conversation with every question. One that continues what the model
    has seen adds its new messages; any other, such as one whose earlier messages the environment
    rewrote, or another agent's, begins a new context.
    """

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
        self._question: Question | None = None
        self._said: set[str] = set()
        self.max_turns = limit

    def make_task(self, seed: int, split: str) -> Task:
        raise EnvError(
            f"{self._name}: tasks are the rows of its data set; there are none for seeds"
        )

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self.close()
        self._said = set()
        self._exchange = Exchange(self._play(task))
        self._question = self._call("setup", self._exchange.start)
        if self._question is None:
            outcome = self._outcome()
            raise EnvError(
                f"{self._name}: the episode ended before the model was asked "
                f"({outcome.error or 'no reason'})"
            )
        return self._whole(self._question)

    def step(self, message: Message) -> StepResult:
        if self._exchange is None or self._question is None:
            raise EnvError(f"{self._name}: step needs a running episode; call reset first")
        exchange, asked = self._exchange, self._question
        self._said.add(message.content)
        question = self._call("step", lambda: exchange.answer(message))
        if question is None:
            return self._end(message)
        self._question = question
        new = added(asked, message, question.messages)
        if new is not None and question.tools == asked.tools:
            return StepResult(
                messages=new, reward=0.0, action=message.content, info=dict(asked.seat)
            )
        whole = self._whole(question)
        return StepResult(
            messages=_last_words(whole.messages),
            reward=0.0,
            action=message.content,
            info=dict(asked.seat),
            rewritten=whole,
        )

    def finish(self) -> StepResult:
        if self._exchange is None:
            raise EnvError(f"{self._name}: finish needs a running episode; call reset first")
        self._call("finish", self._exchange.cut)
        return replace(self._end(None), messages=(), terminated=False, truncated=True)

    def close(self) -> None:
        exchange, self._exchange, self._question = self._exchange, None, None
        if exchange is not None:
            exchange.close()

    def _whole(self, question: Question) -> Observation:
        """All that a question shows. The model's own replies are text here as everywhere: their
        tool calls stand in it."""
        messages = (Message.from_json(item) for item in question.messages)
        shown = tuple(
            replace(message, tool_calls=())
            if message.role == "assistant" and message.content in self._said
            else message
            for message in messages
        )
        return Observation(messages=shown, tools=tuple(question.tools))

    def _end(self, reply: Message | None) -> StepResult:
        outcome = self._outcome()
        if outcome.error is not None:
            raise EnvError(f"{self._name}: {outcome.error}")
        reward = read_reward(outcome.reward, name=self._name, what="its reward")
        # What is added after the last reply, such as the last tool's answer, belongs to the record.
        asked = self._question
        last = () if asked is None or reply is None else added(asked, reply, outcome.messages)
        seat: Mapping[str, Json] = {} if asked is None else asked.seat
        return StepResult(
            messages=last or (),
            reward=reward,
            terminated=not outcome.truncated,
            truncated=outcome.truncated,
            reward_parts=dict(outcome.parts) or {"env": reward},
            info={**seat, "metrics": dict(outcome.metrics), **(outcome.info or {})},
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
            raise EnvError(
                f"{self._name}: {what} raised {type(error).__name__}: {error}"
            ) from error


def added(
    asked: Question, reply: Message, messages: Sequence[Mapping[str, Json]]
) -> tuple[Message, ...] | None:
    """The environment's messages after the reply; None where `messages` do not begin with the
    request and its reply, or the environment spoke as the assistant."""
    known = len(asked.messages)
    if len(messages) <= known or list(messages[:known]) != asked.messages:
        return None
    if messages[known]["role"] != "assistant" or messages[known]["content"] != reply.content:
        return None
    new = tuple(Message.from_json(item) for item in messages[known + 1 :])
    return None if any(message.role == "assistant" for message in new) else new


def _last_words(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after the last one of the assistant."""
    start = max((i for i, m in enumerate(messages, 1) if m.role == "assistant"), default=0)
    return tuple(messages[start:])
