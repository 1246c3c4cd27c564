"""The core types of turnwise, from a task to the flat tokens of a training sample.

Standard library only. Every type is frozen; data flows to the right:

    Task -> Observation -> (Completion -> StepResult)* -> Turn* -> Episode -> Sample

Messages and tokens are separate: an environment sees messages, a generator sees ids, and only a
Turn has both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, cast

Json = Any  # what json.loads returns; environments put nothing else into payload and info
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


class Status(StrEnum):
    """How an episode ended. A failure is a status and never a reward.

    Example:
        >>> Status.TRUNCATED_TURNS.truncated, Status.ENV_TIMEOUT.failed, Status.COMPLETED.failed
        (True, True, False)
    """

    COMPLETED = "completed"
    """The environment ended the episode."""
    TRUNCATED_TURNS = "truncated_turns"
    """Cut by a limit on turns or actions: the state after the last turn still has a value."""
    TRUNCATED_LENGTH = "truncated_length"
    """Cut by the token budget of its context."""
    ENV_ERROR = "env_error"
    """The environment raised, or returned something that is not a step result."""
    ENV_TIMEOUT = "env_timeout"
    """The environment did not answer in time."""
    GENERATOR_ERROR = "generator_error"
    """The generator raised."""

    @property
    def truncated(self) -> bool:
        """True where the episode was cut and the value of its last state must be bootstrapped."""
        return self in (Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH)

    @property
    def failed(self) -> bool:
        """True where the episode must never be trained on."""
        return self in (Status.ENV_ERROR, Status.ENV_TIMEOUT, Status.GENERATOR_ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool that the model asked for, in OpenAI's shape.

    Example:
        >>> ToolCall(id="call_0", name="add", arguments='{"a": 1, "b": 2}').to_json()["function"]["name"]
        'add'
    """

    id: str
    """Names the call, so that the tool's answer can refer to it."""
    name: str
    """The tool."""
    arguments: str
    """A JSON object as text, exactly as the model wrote it (it may be malformed)."""

    def to_json(self) -> dict[str, Json]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "ToolCall":
        function = data["function"]
        return cls(id=str(data["id"]), name=str(function["name"]), arguments=function["arguments"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation. Holds text, never tokens.

    Example:
        >>> Message(role="user", content="Up or down?").to_json()
        {'role': 'user', 'content': 'Up or down?'}
    """

    role: Role
    """Who speaks."""
    content: str
    """The text."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tools that an assistant message asks for."""
    tool_call_id: str | None = None
    """On a tool message: the call that it answers."""
    name: str | None = None
    """On a tool message: the tool that answers."""

    def to_json(self) -> dict[str, Json]:
        """The message as chat templates and OpenAI-compatible servers take it."""
        data: dict[str, Json] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            data["tool_calls"] = [call.to_json() for call in self.tool_calls]
        if self.tool_call_id is not None:
            data["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            data["name"] = self.name
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Message":
        calls = cast(Sequence[Mapping[str, Json]], data.get("tool_calls") or ())
        return cls(
            role=data["role"],
            content=data.get("content") or "",
            tool_calls=tuple(ToolCall.from_json(call) for call in calls),
            tool_call_id=data.get("tool_call_id"),
            name=data.get("name"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem instance: everything that fixes an episode's initial state, and nothing that
    changes.

    Example:
        >>> task = Task(id="FrozenLake/train/17", seed=17, split="train")
        >>> Task.from_json(task.to_json()) == task
        True
    """

    id: str
    """Unique among the tasks of a run; train and validation ids are disjoint."""
    seed: int
    """Decides the initial state. Shared by all members of a group."""
    payload: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """A row of a data set, or keyword arguments for the environment's reset."""
    split: str = "train"
    """"train" or "val"."""

    def to_json(self) -> dict[str, Json]:
        return {
            "id": self.id,
            "seed": self.seed,
            "payload": dict(self.payload),
            "split": self.split,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Task":
        return cls(id=data["id"], seed=data["seed"], payload=data["payload"], split=data["split"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """How a turn is played where the turns of an episode are not one conversation, as with a
    program that calls the model when and how it likes.

    Example:
        >>> Call(parent=0, max_tokens=64).parent
        0
    """

    parent: int | None = None
    """Index of the turn whose conversation this one continues. None: the last one's, or a new one
    where the conversation was rewritten."""
    role: str = ""
    """Name of the role that speaks. Each role gets credit from its own rewards."""
    max_tokens: int | None = None
    """Limit of this reply, below the limit of the rollout."""
    stop: tuple[str, ...] = ()
    """Strings that end this reply, besides those of the rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment shows before the first turn.

    Example:
        >>> Observation(messages=(Message(role="user", content="Find the goal."),)).messages[0].role
        'user'
    """

    messages: tuple[Message, ...]
    """The opening messages, a system message included if there is one."""
    tools: tuple[Mapping[str, Json], ...] = ()
    """Schemas of the tools that the model may call, for the chat template."""
    state_key: str | None = None
    """Names the state for algorithms that compare turns played from the same state (GiGPO). None:
    the text."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    call: Call | None = None
    """How the first turn is played, where that is not the usual way."""

    def to_json(self) -> dict[str, Json]:
        return {
            "messages": [message.to_json() for message in self.messages],
            "tools": [dict(tool) for tool in self.tools],
            "state_key": self.state_key,
            "info": dict(self.info),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Observation":
        return cls(
            messages=tuple(Message.from_json(message) for message in data["messages"]),
            tools=tuple(data["tools"]),
            state_key=data["state_key"],
            info=data["info"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an environment answers to one message of the model.

    Terminated and truncated are different things: a truncated episode could have gone on, so its
    last state has a value; a terminated one has none.

    Example:
        >>> StepResult(messages=(), reward=1.0, terminated=True).done
        True
    """

    messages: tuple[Message, ...]
    """Appended to the conversation. May be empty once the episode is over."""
    reward: float
    """Reward of this turn, penalties included."""
    terminated: bool = False
    truncated: bool = False
    action: str | None = None
    """The action that was parsed from the message, or None where there was none."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the reward is made of, by name (env, format, ...). Sums to the reward where given."""
    state_key: str | None = None
    """Names the state that the next turn is played from. None: the text of the messages."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Facts for metrics, such as {"success": True}."""
    rewritten: Observation | None = None
    """The whole conversation as the model reads it from here on, where the environment changed what
    was said before or what tools there are: a new context begins. None: `messages` are added."""
    call: Call | None = None
    """How the next turn is played. None: it continues this one."""
    earlier: Mapping[int, float] = field(default_factory=dict[int, float])
    """Rewards that became known now for earlier turns, by their index."""
    repeated: Mapping[int, float] = field(default_factory=dict[int, float])
    """The part of `earlier` that another turn gets too (see `Turn.repeated`)."""
    trained: bool = True
    """False: the turn is not trained on, because its reply was not read or its role is fixed."""
    untrained: tuple[int, ...] = ()
    """Indices of turns whose results said `trained`, and which turn out not to have been read."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    def to_json(self) -> dict[str, Json]:
        """All but `call`, `earlier`, `repeated`, `trained` and `untrained`, which are decided in the
        process of the rollout."""
        rewritten = self.rewritten
        return {
            **({} if rewritten is None else {"rewritten": rewritten.to_json()}),
            "messages": [message.to_json() for message in self.messages],
            "reward": self.reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "action": self.action,
            "reward_parts": dict(self.reward_parts),
            "state_key": self.state_key,
            "info": dict(self.info),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "StepResult":
        rewritten = data.get("rewritten")
        return cls(
            messages=tuple(Message.from_json(message) for message in data["messages"]),
            reward=data["reward"],
            terminated=data["terminated"],
            truncated=data["truncated"],
            action=data["action"],
            reward_parts=data["reward_parts"],
            state_key=data["state_key"],
            info=data["info"],
            rewritten=None if rewritten is None else Observation.from_json(rewritten),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a generator sampled, token for token. Holds no text: text is derived, ids are the truth.

    Example:
        >>> Completion(ids=(5, 2), logprobs=(-0.5, -0.75), finish_reason="stop").logprob
        -1.25
    """

    ids: tuple[int, ...]
    """Sampled ids, the stop token included. Never empty."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution it was drawn from."""
    finish_reason: FinishReason
    """"stop": a stop id or stop string ended it. "length": a token budget did."""
    policy_version: int = 0
    """The number of updates that the sampling weights had seen."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(
                f"a completion has one log-prob per id, got {len(self.ids)} ids and "
                f"{len(self.logprobs)} log-probs"
            )

    @property
    def logprob(self) -> float:
        """Log-probability of the whole completion."""
        return sum(self.logprobs)

    def to_json(self) -> dict[str, Json]:
        return {
            "ids": list(self.ids),
            "logprobs": list(self.logprobs),
            "finish_reason": self.finish_reason,
            "policy_version": self.policy_version,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Completion":
        return cls(
            ids=tuple(data["ids"]),
            logprobs=tuple(data["logprobs"]),
            finish_reason=data["finish_reason"],
            policy_version=data["policy_version"],
        )


LATER = "later"
"""The part of a turn's reward that became known after the turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange: the model read some ids, said a completion, and the environment replied.

    `prompt_ids` are the ids that were new to the model. Where `restart` is False they continue the
    previous turn (or the turn `parent`), so the model saw (its prompt + its completion +
    prompt_ids); where it is True a new context began (the first turn, a window that moved, a
    chat template that rewrote history). `turnwise.data.samples` follows these links.

    Example:
        >>> done = Completion(ids=(7, 2), logprobs=(-1.0, -0.5), finish_reason="stop")
        >>> Turn(prompt_ids=(1, 4), completion=done, text="up", reward=1.0, restart=True).num_ids
        4
    """

    prompt_ids: tuple[int, ...]
    """Ids that the model had not seen before this turn."""
    completion: Completion
    text: str
    """The completion decoded, for people, parsers and environments."""
    restart: bool
    """True: prompt_ids are the whole context. False: they extend the previous turn's."""
    action: str | None = None
    """The action that the environment understood, None where it understood none."""
    messages: tuple[Message, ...] = ()
    """The environment's reply."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    state_key: str = ""
    """Names the state in which this turn was played."""
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    rewritten: Observation | None = None
    """The conversation that the next turn begins with, where the environment rewrote it."""
    generate_seconds: float = 0.0
    env_seconds: float = 0.0
    generate_start: float | None = field(default=None, compare=False)
    """When the reply was asked for: seconds by `time.time`, which the processes and machines of a
    rollout share. In a run directory they count from the first episode of the step."""
    env_start: float | None = field(default=None, compare=False)
    """When the environment was asked to step."""
    parent: int | None = None
    """Index of the turn that this one continues, where that is not the previous one."""
    role: str = ""
    """Name of the role that spoke, in an episode with several."""
    trained: bool = True
    repeated: float = 0.0
    """The part of `reward` that a turn of another role holds too: one reward of the whole episode,
    paid to each role. The episode's reward counts it once."""

    @property
    def num_ids(self) -> int:
        return len(self.prompt_ids) + len(self.completion.ids)

    def to_json(self) -> dict[str, Json]:
        data: dict[str, Json] = {
            "prompt_ids": list(self.prompt_ids),
            "completion": self.completion.to_json(),
            "text": self.text,
            "restart": self.restart,
            "action": self.action,
            "messages": [message.to_json() for message in self.messages],
            "reward": self.reward,
            "reward_parts": dict(self.reward_parts),
            "state_key": self.state_key,
            "info": dict(self.info),
            "generate_seconds": self.generate_seconds,
            "env_seconds": self.env_seconds,
        }
        if self.generate_start is not None:
            data["generate_start"] = self.generate_start
        if self.env_start is not None:
            data["env_start"] = self.env_start
        if self.rewritten is not None:
            data["rewritten"] = self.rewritten.to_json()
        if self.parent is not None:
            data["parent"] = self.parent
        if self.role:
            data["role"] = self.role
        if not self.trained:
            data["trained"] = False
        if self.repeated:
            data["repeated"] = self.repeated
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Turn":
        return cls(
            prompt_ids=tuple(data["prompt_ids"]),
            completion=Completion.from_json(data["completion"]),
            text=data["text"],
            restart=data["restart"],
            action=data["action"],
            messages=tuple(Message.from_json(message) for message in data["messages"]),
            reward=data["reward"],
            reward_parts=data["reward_parts"],
            state_key=data["state_key"],
            info=data["info"],
            rewritten=Observation.from_json(data["rewritten"]) if "rewritten" in data else None,
            generate_seconds=data["generate_seconds"],
            env_seconds=data["env_seconds"],
            generate_start=data.get("generate_start"),
            env_start=data.get("env_start"),
            parent=data.get("parent"),
            role=data.get("role", ""),
            trained=data.get("trained", True),
            repeated=data.get("repeated", 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One episode, whole: the unit that is stored, replayed and inspected. Holds no advantages.

    Example:
        >>> episode = Episode(
        ...     id="step3/g1/m0", task=Task(id="t", seed=1), group_id=1, index=0, tag="FrozenLake",
        ...     seed=9, noise_seed=8, prompt=(Message(role="user", content="go"),), turns=(), status=Status.COMPLETED)
        >>> Episode.from_json(episode.to_json()) == episode, episode.reward
        (True, 0.0)
    """

    id: str
    """Unique in a run."""
    task: Task
    group_id: int
    """Episodes of one group share task and initial state."""
    index: int
    """Which member of its group this is."""
    tag: str
    """The environment's tag in the config."""
    seed: int
    """Keys the noise from which this episode's tokens were drawn."""
    noise_seed: int
    """Seeds the environment's own noise, which differs between the members of a group."""
    prompt: tuple[Message, ...]
    """The opening messages."""
    turns: tuple[Turn, ...]
    status: Status
    tools: tuple[Mapping[str, Json], ...] = ()
    """Tool schemas that the chat template was given."""
    final_ids: tuple[int, ...] = ()
    """Ids after the last turn (the environment's last reply) where the episode was truncated: the
    critic values the state they lead to. Never trained on."""
    error: str | None = None
    """The error, where the status is a failure."""
    attempts: int = 1
    """How often the episode was started, retries included."""
    reset_start: float | None = field(default=None, compare=False)
    """When the environment was asked to reset, as `Turn.generate_start`."""
    reset_seconds: float = field(default=0.0, compare=False)

    @property
    def reward(self) -> float:
        """The undiscounted sum of the turns' rewards. One that several roles got counts once."""
        return float(sum(turn.reward - turn.repeated for turn in self.turns))

    @property
    def reward_parts(self) -> dict[str, float]:
        """What the reward is made of, summed over the turns."""
        parts: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.reward_parts.items():
                parts[name] = parts.get(name, 0.0) + value
            if turn.repeated:
                parts[LATER] = parts.get(LATER, 0.0) - turn.repeated
        return parts

    @property
    def success(self) -> bool | None:
        """The last value of `success` that the environment reported, None if it never did."""
        for turn in reversed(self.turns):
            if "success" in turn.info:
                return bool(turn.info["success"])
        return None

    def to_json(self) -> dict[str, Json]:
        data: dict[str, Json] = {
            "id": self.id,
            "task": self.task.to_json(),
            "group_id": self.group_id,
            "index": self.index,
            "tag": self.tag,
            "seed": self.seed,
            "noise_seed": self.noise_seed,
            "prompt": [message.to_json() for message in self.prompt],
            "turns": [turn.to_json() for turn in self.turns],
            "status": self.status.value,
            "tools": [dict(tool) for tool in self.tools],
            "final_ids": list(self.final_ids),
            "error": self.error,
            "attempts": self.attempts,
        }
        if self.reset_start is not None:
            data |= {"reset_start": self.reset_start, "reset_seconds": self.reset_seconds}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Episode":
        return cls(
            id=data["id"],
            task=Task.from_json(data["task"]),
            group_id=data["group_id"],
            index=data["index"],
            tag=data["tag"],
            seed=data["seed"],
            noise_seed=data["noise_seed"],
            prompt=tuple(Message.from_json(message) for message in data["prompt"]),
            turns=tuple(Turn.from_json(turn) for turn in data["turns"]),
            status=Status(data["status"]),
            tools=tuple(data["tools"]),
            final_ids=tuple(data["final_ids"]),
            error=data["error"],
            attempts=data["attempts"],
            reset_start=data.get("reset_start"),
            reset_seconds=data.get("reset_seconds", 0.0),
        )

    def to_line(self) -> str:
        """The episode as one line of JSON, without the newline."""
        return json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_line(cls, line: str) -> "Episode":
        return cls.from_json(json.loads(line))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A flat stretch of tokens to train on: one unbroken context of one episode. Holds no padding.

    An episode whose context was never restarted is one sample; every restart opens another. All
    sequences have the length T of `ids`; position t refers to the choice of token t, given the ids
    before it.

    Example: two turns, where the model said [7 8] and [9], after the prompts [1 2] and [3]

        ids            1   2   7   8   3   9
        response_mask  .   .   x   x   .   x
        turn_ids      -1  -1   0   0  -1   1
        rewards        0   0   0  r0   0  r1
    """

    ids: tuple[int, ...]  # [T]
    response_mask: tuple[bool, ...]  # [T]
    """True where the model produced the token in this context."""
    loss_mask: tuple[bool, ...]  # [T]
    """True where the token is trained on; lies within response_mask."""
    logprobs: tuple[float, ...]  # [T]
    """The sampler's log-probs, 0.0 where response_mask is False."""
    turn_ids: tuple[int, ...]  # [T]
    """The turn's index in its episode, -1 where response_mask is False."""
    rewards: tuple[float, ...]  # [T]
    """Each turn's reward on the turn's last token, 0.0 elsewhere."""
    state_keys: Mapping[int, str]
    """Turn index -> the name of the state it was played from."""
    episode_id: str
    group_id: int
    truncated: bool
    """True on the sample that holds the last turn of a truncated episode: bootstrap from the state
    after its ids."""
    role: str = ""
    """The role that spoke, in an episode with several. Roles have separate credit: each is compared
    with the same role of other episodes."""
