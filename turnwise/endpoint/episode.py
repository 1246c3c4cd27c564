# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
"""One episode as its program and the rollout see it: requests on one side, turns on the other."""

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.endpoint.asks import Ask, AskError
from turnwise.endpoint.history import Cause, History, Place
from turnwise.endpoint.replies import Reply, read_reply
from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_info, read_reward, words
from turnwise.isolation.processes import WorkerLostError
from turnwise.types import Call, FinishReason, Json, Observation, StepResult, Task

MAX_WAITING = 256
"""Requests of one episode that wait for a reply at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program ended."""

    reward: float | None = None
    """For every role that is trained."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """By role; "" is the one without a name."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    error: str | None = None
    lost: bool = False
    """Its worker was lost: not the program's fault."""

    @classmethod
    def read(cls, value: Any, *, name: str = "the program") -> "Outcome":
        """From what a program returned: a number, a dict with `reward`, or an object with one.

        Raises:
            EnvError: it is something else.

        Example:
            >>> Outcome.read({"reward": {"planner": 1, "worker": 0.5}, "success": True}).rewards
            {'planner': 1.0, 'worker': 0.5}
        """
        info: dict[str, Json] = {}
        if isinstance(value, Mapping):
            info = read_info(value.get("info"), name=name)
            if value.get("success") is not None:
                info["success"] = bool(value["success"])
            value = value.get("reward")
        elif value is not None and hasattr(value, "reward"):
            if getattr(value, "success", None) is not None:
                info["success"] = bool(value.success)
            value = value.reward
        if value is None:
            return cls(info=info)
        if not isinstance(value, Mapping):
            return cls(reward=read_reward(value, name=name), info=info)
        rewards = {str(role): read_reward(number, name=name) for role, number in value.items()}
        return cls(rewards=rewards, info=info)

    @property
    def pays(self) -> bool:
        """True if the program returned a reward."""
        return self.reward is not None or bool(self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Facts about the tokens of a reply. The defaults are those of a reply without
    tokens, of a person or a test."""

    prompt: int = 0
    """Tokens that were new to the policy before its reply."""
    restart: bool | None = None
    """Whether its context began anew. None: it has no tokens."""
    completion: int = 1
    """Tokens of the reply."""
    finish_reason: FinishReason = "stop"
    logprobs: tuple[tuple[str, float], ...] = ()
    """(text, log-prob) of every token, where the request asks for them."""


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits for its replies."""

    ask: Ask
    place: Place
    answer: "asyncio.Future[list[Reply]]"
    name: str
    """The id of its answer, and of its first reply. Reply k of several is NAME-k."""
    replies: list[Reply] = field(default_factory=list[Reply])
    cause: Cause = "first"
    """Why its next reply is in the context that it is in."""
    readers: int = 1
    """Connections that wait for the answer. 0: the client is gone."""

    @property
    def unread(self) -> bool:
        """True if no client gets its replies: it is gone, or was refused."""
        answer = self.answer
        refused = answer.done() and (answer.cancelled() or answer.exception() is not None)
        return refused or self.readers <= 0


@dataclass(slots=True)
class _Turn:
    pending: Pending
    role: str
    info: Mapping[str, Json]
    """How its context began, and which settings of its request have no effect."""
    reply: Reply
    tokens: int
    """Ids of its context after it."""
    reward: float = 0.0
    told: bool | None = None
    """Whether the rollout was told to train on it. None: it has not its result yet."""


class AgentEpisode:
    """One episode. All methods run on the event loop of the endpoint.

    The program asks; the rollout takes one request at a time (`next_turn`), and answers it with
    what the policy said (`answer`). Requests that come together are answered one after another.

    Args:
        lease: seconds without a sign of life after which its worker counts as lost.
    """

    def __init__(
        self,
        task: Task,
        *,
        trained_roles: frozenset[str] | None,
        ignore: frozenset[str],
        lease: float,
    ) -> None:
        self.token = secrets.token_urlsafe(18)
        self.task = task
        self.lease = lease
        self.ignore = ignore
        self.over: str | None = None
        """Why no further request is answered."""
        self.over_code = "episode_over"
        """What a request is told then, in a word for programs."""
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a worker has the task."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._trained_roles = trained_roles
        self._history = History()
        self._queue: deque[Pending] = deque()
        self._came = asyncio.Event()
        self._current: Pending | None = None
        self._turns: list[_Turn] = []
        self._asked = 0
        self._paid = False
        """True if the program has given a reward to one of its replies."""
        self._known: dict[bytes, Pending] = {}

    # What the program's side calls.

    def ask(self, ask: Ask, *, digest: bytes, again: bool) -> Pending:
        """Queues a request. One that a client sends again after a broken connection joins the
        first.

        Raises:
            AskError: the episode is over, or too many requests wait.
        """
        if (
            again
            and (known := self._known.get(digest)) is not None
            and not known.answer.cancelled()
        ):
            known.readers += 1
            return known
        if self.over is not None:
            raise AskError(f"this episode is over: {self.over}", code=self.over_code, status=410)
        if len(self._queue) >= MAX_WAITING:
            raise AskError(
                f"{MAX_WAITING} requests of this episode wait already; policies of one episode "
                "reply one after another",
                code="too_many_requests",
                status=429,
            )
        answer: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._asked += 1
        name = f"chatcmpl-{self.token[:8]}-{self._asked}"
        pending = Pending(ask=ask, place=self._history.find(ask), answer=answer, name=name)
        self._queue.append(pending)
        self._known[digest] = pending
        self._came.set()
        return pending

    def leave(self, pending: Pending) -> None:
        """A client hung up before its answer came."""
        pending.readers -= 1
        if pending.readers <= 0 and pending in self._queue:
            self._queue.remove(pending)
            pending.answer.cancel()

    def reward(self, value: Any, completion: str | None) -> None:
        """A reward for one reply, the newest where no id is given.

        Raises:
            AskError: there is no such reply.
        """
        if not self._turns:
            raise AskError("a reward needs a reply that it is for, and there is none yet")
        turn = self._turns[-1]
        if completion is not None:
            found = [turn for turn in self._turns if turn.reply.id == completion]
            if not found:
                raise AskError(f"no reply of this episode has the id {completion[:80]!r}")
            (turn,) = found
        try:
            turn.reward += read_reward(value, name="the program")
        except EnvError as error:
            raise AskError(str(error)) from error
        self._paid = True

    def end(self, outcome: Outcome) -> None:
        """The program has ended."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)
            self._came.set()
        current = self._current
        self.close(f"the program has {'failed' if outcome.error else 'ended'}")
        # The policy may reply to it at this moment: that is a turn which nobody reads.
        self._current = current

    # What the rollout's side calls.

    @property
    def current(self) -> Ask | None:
        """The request that waits for the rollout's answer."""
        return None if self._current is None else self._current.ask

    async def opening(self) -> Observation:
        """The program's first request."""
        pending = await self._next()
        if pending is None:
            outcome = self.outcome.result()
            self._raise_for(outcome)
            raise EnvError("the program ended without calling the model")
        ask = pending.ask
        return Observation(
            messages=ask.messages,
            tools=ask.tools,
            state_key=pending.place.state,
            call=Call(role=ask.role, max_tokens=ask.max_tokens, stop=ask.stop),
        )

    def answer(self, text: str, said: Said) -> None:
        """Gives the program what the policy said."""
        pending = self._current
        if pending is None:
            raise EnvError("a reply came, and the program did not ask for one")
        number = len(self._turns)
        parent = pending.place.parent
        goes_on = said.restart is False and parent is not None
        seen = self._turns[parent].tokens if goes_on and parent is not None else 0
        prompt = seen + said.prompt
        thoughts, content, calls = read_reply(text, pending.ask, turn=number)
        reply = Reply(
            id=f"{pending.name}-{len(pending.replies)}" if pending.replies else pending.name,
            content=content,
            thoughts=thoughts,
            calls=calls,
            finish_reason=said.finish_reason,
            prompt_tokens=prompt,
            completion_tokens=said.completion,
            logprobs=said.logprobs,
        )
        self._turns.append(
            _Turn(
                pending=pending,
                role=pending.ask.role,
                info=self._info(pending, said),
                reply=reply,
                tokens=prompt + said.completion,
            )
        )
        self._history.said(pending.ask, pending.place, reply.message, number)
        pending.replies.append(reply)
        if len(pending.replies) < pending.ask.n and self.over is None and not pending.unread:
            self._queue.appendleft(pending)  # the next of n replies to the same request
            self._came.set()
        else:
            if not pending.answer.done():
                pending.answer.set_result(pending.replies)
            # A long conversation is not kept once for every turn.
            pending.ask, pending.place.tail = replace(pending.ask, messages=()), ()
            self._forget_old()
        self._current = None

    async def next_turn(self) -> StepResult:
        """The result of the turn that was answered last: the program's next request, or its end."""
        pending = await self._next()
        turn = self._turns[-1]
        if pending is not None:
            ask, place = pending.ask, pending.place
            new = place.parent is None
            return StepResult(
                messages=() if new else place.tail,
                rewritten=Observation(messages=place.tail, tools=ask.tools) if new else None,
                reward=self._settle(turn),
                action=turn.reply.content or None,
                call=Call(
                    parent=place.parent, role=ask.role, max_tokens=ask.max_tokens, stop=ask.stop
                ),
                state_key=place.state,
                info=turn.info,
                earlier=self._earlier(),
                trained=self._trained(turn),
                untrained=self._untrained(),
            )
        outcome = self.outcome.result()
        self._raise_for(outcome)
        if not outcome.pays and not self._paid:
            raise EnvError("the program returned no reward, and gave none to its replies")
        return self._ending(outcome, terminated=True)

    async def cut(self, why: str, *, code: str, patience: float, otherwise: float) -> StepResult:
        """The rollout cuts the episode. The program is told, and may still return its reward."""
        self.close(why, code=code)
        try:
            outcome = await asyncio.wait_for(asyncio.shield(self.outcome), patience)
        except TimeoutError:
            outcome = Outcome(reward=otherwise, info={"unfinished": True})
        if outcome.error is not None:  # it did not expect to be cut
            outcome = Outcome(reward=otherwise, info={"unfinished": True})
        return self._ending(outcome, terminated=False)

    def close(self, why: str, *, code: str = "episode_over") -> None:
        """No further request is answered; those that wait are refused."""
        status = 400 if code == "context_length_exceeded" else 410
        if self.over is None:
            self.over = why
            # A shorter conversation would not help any more.
            self.over_code = code if status == 410 else "episode_over"
        waiting = [*self._queue, *([self._current] if self._current is not None else [])]
        self._queue.clear()
        self._current = None
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(
                    AskError(f"this episode is over: {why}", code=code, status=status)
                )
                pending.answer.exception()  # marks it as retrieved if no request waits

    async def _next(self) -> Pending | None:
        """The next request, None once the program has ended."""
        while True:
            if self._queue:
                pending = self._current = self._queue.popleft()
                pending.cause = self._history.cause(pending.ask, pending.place)
                return pending
            if self.outcome.done():
                return None
            self._came.clear()
            await self._came.wait()

    def _forget_old(self) -> None:
        """Keeps the last answers only, for clients that ask again."""
        for digest in list(self._known)[:-MAX_WAITING]:
            if self._known[digest].answer.done():
                del self._known[digest]

    def _ending(self, outcome: Outcome, *, terminated: bool) -> StepResult:
        turn = self._turns[-1] if self._turns else None
        repeated = self._pay(outcome)
        return StepResult(
            messages=(),
            reward=outcome.reward or 0.0 if turn is None else self._settle(turn),
            terminated=terminated,
            truncated=not terminated,
            action=None if turn is None else turn.reply.content or None,
            info={**({} if turn is None else turn.info), **outcome.info},
            earlier=self._earlier(),
            repeated=repeated,
            trained=True if turn is None else self._trained(turn),
            untrained=self._untrained(),
        )

    def _pay(self, outcome: Outcome) -> dict[int, float]:
        """Adds the rewards of the end to the last reply of each role that was read. Returns what a
        turn got that a later one got too, by index: one reward for all trained roles is counted
        once.

        Raises:
            EnvError: a role is paid that never spoke.
        """
        last: dict[str, int] = {}
        for index, turn in enumerate(self._turns):
            before = last.get(turn.role)
            if before is None or not turn.pending.unread or self._turns[before].pending.unread:
                last[turn.role] = index
        for role, value in outcome.rewards.items():
            if role in last:
                self._turns[last[role]].reward += value
            elif value:
                raise EnvError(
                    f"the program returned a reward for the role {role!r}, which never spoke; "
                    f"those that did: {', '.join(map(repr, last))}"
                )
        if outcome.reward is None or not last:
            return {}
        trained = self._trained_roles
        paid = [at for role, at in last.items() if trained is None or role in trained]
        paid = sorted(paid or [max(last.values())])
        for index in paid:
            self._turns[index].reward += outcome.reward
        return {index: outcome.reward for index in paid[:-1]}

    def _settle(self, turn: _Turn) -> float:
        """The rewards that the turn has so far. Later ones go into `earlier`."""
        reward, turn.reward = turn.reward, 0.0
        if turn.told is None:
            turn.told = self._trained(turn)
        return reward

    def _earlier(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for index, turn in enumerate(self._turns[:-1]):
            if turn.told is not None and turn.reward:
                found[index] = self._settle(turn)
        return found

    def _untrained(self) -> tuple[int, ...]:
        """Turns that the rollout was told to train on and that nobody will read, such as the first
        of several choices whose client has gone."""
        found = [
            index for index, turn in enumerate(self._turns) if turn.told and turn.pending.unread
        ]
        for index in found:
            self._turns[index].told = False
        return tuple(found)

    def _trained(self, turn: _Turn) -> bool:
        fixed = self._trained_roles is not None and turn.role not in self._trained_roles
        return not fixed and not turn.pending.unread

    def _info(self, pending: Pending, said: Said) -> dict[str, Json]:
        cause = pending.cause
        if said.restart and pending.place.parent is not None:
            cause = "template"
        info: dict[str, Json] = {"context_cause": cause}
        if pending.ask.overridden:
            info["overridden"] = ", ".join(pending.ask.overridden)
        return info

    def _raise_for(self, outcome: Outcome) -> None:
        if outcome.lost:
            raise WorkerLostError(outcome.error or "its worker was lost")
        if outcome.error is not None:
            raise EnvError(words(outcome.error))
