# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""TextTurns: adapts a BaseEnv to the interface of rollouts (`Env` in base.py).

Checks the environment's results; a failure is an EnvError. Never changes the model's text.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from random import Random
from typing import Any, TypeVar

from turnwise.config.schema import EnvConfig
from turnwise.envs.actions import (
    answer_form,
    describe_format,
    match_action,
    split_reply,
    write_reply,
)
from turnwise.envs.any_object import ObjectEnv
from turnwise.envs.base import BadActionError, BaseEnv, EnvError, Hint
from turnwise.envs.gate import ask, read_info, read_reward, words
from turnwise.envs.shaping import shaping_parts
from turnwise.envs.validate import check_playing, read_reset, read_step
from turnwise.seeding import derive_seed
from turnwise.types import Json, Message, Observation, StepResult, Task

T = TypeVar("T")
SEED_LIMIT = 2**30
"""Environments get seeds below twice this number, which all common random generators accept."""


class TextTurns:
    """Adapts a BaseEnv: builds messages, parses replies, plays actions, adds up rewards.

    The system message has the instruction and the reply format; each user message has the state and
    the actions left. Reward parts: "env" from the environment, "format" for a reply without a legal
    action, then shaping.
    """

    def __init__(self, env: BaseEnv, *, config: EnvConfig, name: str) -> None:
        self.env = env
        self.config = config
        self.name = name
        _check_actions(env.actions, separator=config.format.action_sep, name=name)
        self._reset_keywords, any_keyword = _reset_keywords(env, config, name)
        self._takes_seed = any_keyword or "seed" in self._reset_keywords
        self._phase = (
            "new"  # new -> playing -> over; failed after an EnvError, until the next reset
        )
        self._text = ""
        self._actions_left: int | None = None
        self._closed = False
        self._fixed_actions = (
            env.actions
        )  # an instruction set by a reset belongs to the state, whose text must show it
        limit = {"max_actions_per_turn": 1} if env.max_turns == 1 else {}
        self._format = config.format.model_copy(update=limit)
        self._form: tuple[tuple[str, ...], str] | None = None

    @property
    def max_turns(self) -> int | None:
        own = self.env.max_turns
        if self.config.single_turn is not None:
            own = 1 if self.config.single_turn else (None if own == 1 else own)
        limits = [limit for limit in (own, self.config.max_turn) if limit is not None]
        return min(limits, default=None)

    def make_task(self, seed: int, split: str) -> Task:
        """The task of this seed. An environment without splits gets small seeds for training and
        large ones for validation."""
        small = seed if 0 <= seed < SEED_LIMIT else derive_seed(seed, "env-seed") % SEED_LIMIT
        env_seed = (
            small if "split" in self._reset_keywords or split == "train" else small + SEED_LIMIT
        )
        return Task(id=f"{self.name}/{split}/{seed}", seed=env_seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        keywords: dict[str, Any] = {**self.config.reset_options, **task.payload}
        if "noise_seed" in self._reset_keywords:
            keywords["noise_seed"] = noise_seed % (2 * SEED_LIMIT)
        if "split" in self._reset_keywords:
            keywords["split"] = task.split
        self._phase = "failed"
        if self._takes_seed:
            keywords["seed"] = task.seed
        self._closed = False
        value = self._call("reset", lambda: self.env.reset(**keywords))
        self._text, info = read_reset(value, name=self.name)
        self._actions_left = self.config.max_actions_per_episode
        self._phase = "playing"
        return Observation(
            messages=(
                Message(role="system", content=self._system_text()),
                self._user_message(valid=True),
            ),
            state_key=self._state_key(),
            info=info,
        )

    def step(self, message: Message) -> StepResult:
        check_playing(self._phase, name=self.name)
        self._phase = "failed"
        before = self._potential()
        played, env_reward, info = [], 0.0, dict[str, Json]()
        terminated = truncated = False
        refusal = ""
        for piece in split_reply(message.content, self._format, self.env.actions)[0]:
            action = match_action(piece, self.env.actions)
            if action is None:
                break
            try:
                value = self._call("step", lambda action=action: self.env.step(action))
            except BadActionError as error:
                refusal, terminated = words(error), error.over
                info |= read_info(error.info, name=self.name)
                break
            result = read_step(value, name=self.name)
            played.append(action)
            self._text, terminated, truncated = result.text, result.terminated, result.truncated
            env_reward += result.reward
            info |= result.info
            if self._actions_left is not None:
                self._actions_left -= 1
                truncated = truncated or (self._actions_left == 0 and not terminated)
            if terminated or truncated:
                break
        valid = bool(played) and not refusal
        parts = {"env": read_reward(env_reward, name=self.name)}
        if not valid:
            parts["format"] = self.config.format.format_penalty
        after = 0.0 if terminated else self._potential()
        parts |= shaping_parts(
            parts, self.config.shaping, before=before, after=after, name=self.name
        )
        self._phase = "over" if terminated or truncated else "playing"
        return StepResult(
            messages=(self._user_message(valid=valid, refusal=refusal),),
            reward=sum(parts.values()),
            terminated=terminated,
            truncated=truncated,
            action=f" {self.config.format.action_sep} ".join(played) if played else None,
            reward_parts=parts,
            state_key=self._state_key(),
            info=info | {"valid": valid, "num_actions": len(played)},
        )

    def finish(self) -> StepResult:
        """No reward: every step has already returned its own."""
        return StepResult(messages=(), reward=0.0, truncated=True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._phase = "closed"
            self._call("close", self.env.close)

    def hint(self, what: Hint, seed: int) -> Json:
        return self._call(f"the hint {what!r}", lambda: self._hint(what, seed))

    def _hint(self, what: Hint, seed: int) -> Json:
        think = ""
        match what:
            case "actions":
                return list(self.env.actions)
            case "board":
                return self.env.render() or None
            case "expert":
                actions = self._expert_actions()
                if actions and self._format.think:
                    think = self._expert_thought()
            case "random":
                rng = Random(seed)
                drawn = [
                    self.env.random_action(rng)
                    for _ in range(rng.randint(1, self._format.max_actions_per_turn))
                ]
                actions = [action for action in drawn if action is not None]
        return write_reply(actions, self._format, think=think) if actions else None

    def _expert_thought(self) -> str:
        said = self.env.expert_thought() or ""
        if "<think>" in said or "</think>" in said:
            raise EnvError(
                f"{self.name}: expert_thought is the text between the tags, without <think> and "
                f"</think>; got {said!r:.80}"
            )
        return said

    def _expert_actions(self) -> list[str]:
        """As many of the best actions as fit into a turn. Actions after the first come from a copy
        of the environment."""
        ahead, actions = self.env, list[str]()
        for _ in range(self._format.max_actions_per_turn):
            action = ahead.expert_action()
            if action is None:
                break
            actions.append(action)
            if len(actions) < self._format.max_actions_per_turn:
                ahead = copy.deepcopy(ahead) if ahead is self.env else ahead
                result = read_step(ahead.step(action), name=self.name)
                if result.terminated or result.truncated:
                    break
        return actions

    def _system_text(self) -> str:
        instruction = (
            self.env.instruction if self.config.system_prompt is None else self.config.system_prompt
        )
        if self._format.spell_out and not self.env.actions and instruction:
            return instruction  # any text is legal: the instruction has to show examples
        how = describe_format(self._format, self.env.actions, listed=bool(self._fixed_actions))
        return f"{instruction}\n{how}" if instruction else how

    def _user_message(self, *, valid: bool, refusal: str = "") -> Message:
        """The state, the actions left if they are limited, why an action was refused, and the
        format reminder if due."""
        lines = [self._text]
        if self._actions_left is not None:
            lines.append(f"Actions left: {self._actions_left}.")
        if refusal:
            lines.append(refusal)
        reminder = self.config.format.reminder
        if not valid and reminder != "never":
            lines.append(f"No legal action in your reply. Reply with {self._asked_form()}.")
        elif reminder == "always":
            lines.append(f"Reply with {self._asked_form()}.")
        return Message(role="user", content="\n".join(lines))

    def _asked_form(self) -> str:
        actions = tuple(self.env.actions)
        if (
            self._form is None or self._form[0] != actions
        ):  # in most environments the legal actions never change
            self._form = actions, answer_form(self._format, actions)
        return self._form[1]

    def _state_key(self) -> str:
        key = self._call("state_key", self.env.state_key)
        return self._text if key is None else key

    def _potential(self) -> float | None:
        return (
            self._call("potential", self.env.potential)
            if self.config.shaping.potential_coef
            else None
        )

    def _call(self, what: str, function: Callable[[], T]) -> T:
        """The function's result. Any exception becomes an EnvError."""
        return ask(f"{self.name}: {what}", function)


def _check_actions(actions: Sequence[str], *, separator: str, name: str) -> None:
    """Raises EnvError for legal actions that no reply can name."""
    if isinstance(actions, str):
        raise EnvError(
            f"{name}: actions is a sequence of texts, got one text; write ({actions!r},)"
        )
    for action in actions:
        if separator in action:
            raise EnvError(
                f"{name}: the action {action!r} has the separator {separator!r} of actions in it, "
                "so that no reply "
                "could name it; set env.format.action_sep to something else"
            )


def _reset_keywords(env: BaseEnv, config: EnvConfig, name: str) -> tuple[frozenset[str], bool]:
    """(the keywords that reset names, whether it takes any keyword). Refuses options that it does
    not take."""
    target = env.reset_target if isinstance(env, ObjectEnv) else env.reset
    parameters = inspect.signature(target).parameters
    named = frozenset(
        key for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD
    )
    any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in config.reset_options:
        if key not in named and not any_keyword:
            near = get_close_matches(key, named, n=1, cutoff=0.4)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"it takes {', '.join(sorted(named)) or 'nothing'}"
            )
            raise ValueError(f"reset of environment {name!r} has no option {key!r}; {hint}")
    return named, any_keyword
