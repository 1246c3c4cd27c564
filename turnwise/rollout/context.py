"""ContextManager: messages <-> token ids. It extends a prefix and never re-tokenises the model's
replies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from turnwise.chat.render import Rendered, Renderer, Tokenizer, tools_key
from turnwise.config.schema import RolloutConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.envs.actions import THOUGHTS_FORM
from turnwise.envs.gate import admit_completion, clean_text
from turnwise.generate.base import ContextOverflowError, Session
from turnwise.rollout.outputs import EnvInput, EnvOutput, HistoryEntry, LmInput, LmOutput
from turnwise.seeding import derive_seed
from turnwise.types import Call, Episode, Json, Message, Observation, Status

CHARS_PER_ID = 8
"""Upper bound of the mean characters per token, to cut a long text before it is tokenised."""


@dataclass(slots=True)
class _Conversation:
    """The messages of one episode. Blocks: the opening, then (reply, the environment's answer) for
    every turn."""

    key: str
    seed: int
    tools: tuple[Mapping[str, Json], ...]
    tools_key: str
    blocks: list[list[Message]] = field(default_factory=list[list[Message]])
    rendered: Rendered | None = None  # the rendering that the last reply answered
    window_start: int = 0  # first block of the current context
    num_ids: int = 0  # ids in the session
    contexts: int = 0
    session: Session | None = None  # session of the last context
    reply_end: str = ""  # text of the end-of-turn token of the last reply
    pending: LmInput | None = None
    played: int = 0  # turns of the episode, in all its conversations
    said: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(turn, text of its end-of-turn token) of every reply in this conversation."""
    left: list["_Conversation"] = field(default_factory=list["_Conversation"])
    """The other conversations of the episode."""


class ContextManager:
    """Turns environment outputs into model inputs, and the model's tokens into environment inputs.

    Windows: `full` shows everything; `last_k` the opening system message and the last k turns;
    `single_turn` only the system message and the current state. A moving window starts a new
    context, and so does a chat template or an environment that rewrites history; otherwise only new
    ids are sent. A `response_prefix` is appended to the model's input and prepended to the
    environment's.
    """

    def __init__(self, tokenizer: Tokenizer, config: RolloutConfig, *, max_context: int) -> None:
        self.renderer = Renderer(
            tokenizer, break_control=config.break_control, own=(THOUGHTS_FORM,)
        )
        self._config = config
        self.response_prefix = config.response_prefix
        self._max_context = min(max_context, config.max_context or max_context)
        self._conversations: dict[int, _Conversation] = {}

    def open(
        self,
        env_id: int,
        *,
        key: str,
        seed: int,
        prompt: Sequence[Message],
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> None:
        """Starts a conversation, or restarts it if the environment had one."""
        conversation = _Conversation(
            key=key, seed=seed, tools=tuple(tools), tools_key=tools_key(tools)
        )
        conversation.blocks.append(list(prompt))
        self._conversations[env_id] = conversation

    def close(self, env_id: int) -> Session | None:
        """Removes a conversation; returns its session, which the caller releases."""
        conversation = self._conversations.pop(env_id, None)
        return None if conversation is None else conversation.session

    def get_lm_inputs(self, env_outputs: Sequence[EnvOutput]) -> list[LmInput]:
        """The next input of the model, for every environment that waits for a reply. A first
        state starts its conversation, where `open` has not.

        Raises:
            ContextOverflowError: a conversation has no room left (pass one at a time to know
                which).
        """
        inputs: list[LmInput] = []
        for output in env_outputs:
            if output["done"]:
                continue
            env_id, stale = output["env_id"], None
            if len(output["history"]) == 1 and not self._talks(env_id, output["episode_id"]):
                stale = self.close(env_id)  # of an earlier rollout
                self.open(
                    env_id,
                    key=output["episode_id"],
                    seed=output["seed"],
                    prompt=_messages(output["history"][0]),
                    tools=output["tools"],
                )
            lm_input = self.next_input(env_id, _last_messages(output), _last_rewritten(output))
            inputs.append(lm_input if stale is None else replace(lm_input, stale=stale))
        return inputs

    def next_input(
        self,
        env_id: int,
        messages: Sequence[Message],
        rewritten: Observation | None = None,
        call: Call | None = None,
        *,
        path: Callable[[int], tuple[int, ...]] | None = None,
    ) -> LmInput:
        """The next input of one episode, after the environment's new `messages`, or with
        `rewritten` in place of the whole conversation.

        Args:
            call: how the turn is played, where the environment decides that.
            path: the ids of a turn and of all that it continues. Needed with a call.
        """
        conversation = self._conversations[env_id]
        turn = None if call is None else call.parent
        if rewritten is not None or (turn is not None and turn != conversation.said[-1][0]):
            return self._elsewhere(env_id, messages, rewritten, call, path)
        conversation.blocks[-1].extend(messages)
        self._refuse_long(conversation)
        start = self._window_start(len(conversation.blocks))
        old = conversation.session
        if old is not None and start == conversation.window_start:
            rendered, text = self._continuation(conversation)
        else:
            window = self._window(conversation, start)
            rendered, text = (
                self.renderer.render(window, conversation.tools, key=conversation.tools_key),
                None,
            )
        restart = text is None
        used = 0 if restart else conversation.num_ids
        ids = self._encode(conversation, rendered.text if text is None else text, used=used)
        room = self._max_context - used - len(ids)
        if room < 1:  # nothing has changed yet: the current session is still to be released
            raise self._overflow(conversation, str(len(ids)), used=used)
        session = old
        if restart or session is None:
            conversation.num_ids = 0
            conversation.contexts += 1
            session = conversation.session = _session(conversation)
        conversation.rendered = rendered
        conversation.window_start = start
        limit = min(self._config.max_response_tokens, room)
        lm_input = LmInput(
            env_id=env_id,
            session=session,
            new_ids=ids,
            restart=restart,
            stale=old if restart else None,
            max_tokens=limit,
            context_bound=room <= self._config.max_response_tokens,
        )
        conversation.pending = lm_input
        return lm_input

    def _elsewhere(
        self,
        env_id: int,
        messages: Sequence[Message],
        rewritten: Observation | None,
        call: Call | None,
        path: Callable[[int], tuple[int, ...]] | None,
    ) -> LmInput:
        """The next input where another conversation begins, or an older one goes on.

        The session of the conversation that is left is released. One that goes on gets a new
        session, which holds the ids that were seen and said; its text is not tokenised again.
        """
        old = self._conversations[env_id]
        others = [old, *old.left] if call is not None else []
        parent = None
        if rewritten is not None:
            new = _Conversation(
                key=old.key,
                seed=old.seed,
                tools=rewritten.tools,
                tools_key=tools_key(rewritten.tools),
            )
            new.blocks.append(list(rewritten.messages))
        else:
            assert call is not None
            assert call.parent is not None
            parent = call.parent
            new = self._fork(others, parent)
            new.blocks[-1].extend(messages)
        new.contexts, new.played, new.left = old.contexts, old.played, others
        self._refuse_long(new)
        text, prefix = None, ()
        if parent is not None and path is not None:
            new.rendered, text = self._continuation(new)
            prefix = () if text is None else path(parent)
        if text is None:
            window = self._window(new, 0)
            new.rendered = self.renderer.render(window, new.tools, key=new.tools_key)
        assert new.rendered is not None
        ids = self._encode(new, text or new.rendered.text, used=len(prefix))
        new.num_ids = len(prefix)
        room = self._max_context - len(prefix) - len(ids)
        if room < 1:
            raise self._overflow(new, str(len(ids)), used=len(prefix))
        new.contexts += 1
        new.session = _session(new)
        stale, old.session = old.session, None
        old.left = []
        self._conversations[env_id] = new
        new.pending = LmInput(
            env_id=env_id,
            session=new.session,
            new_ids=ids,
            restart=not prefix,
            stale=stale,
            max_tokens=min(self._config.max_response_tokens, room),
            context_bound=room <= self._config.max_response_tokens,
            prefix=prefix,
            parent=parent if prefix else None,
        )
        return new.pending

    def _fork(self, conversations: Sequence[_Conversation], turn: int) -> _Conversation:
        """A conversation that ends with the reply of an earlier turn."""
        for source in conversations:
            for place, (index, end) in enumerate(source.said, start=1):
                if index != turn:
                    continue
                new = _Conversation(
                    key=source.key, seed=source.seed, tools=source.tools, tools_key=source.tools_key
                )
                new.blocks = [list(block) for block in source.blocks[:place]]
                before = [message for block in new.blocks for message in block]
                new.rendered = self.renderer.render(before, new.tools, key=new.tools_key)
                new.blocks.append([source.blocks[place][0]])
                new.said, new.reply_end = source.said[:place], end
                return new
        raise ValueError(f"{conversations[0].key}: turn {turn} cannot be continued: there is none")

    def get_env_inputs(self, lm_outputs: Sequence[LmOutput]) -> list[EnvInput]:
        """The replies as text for the environments, each with its tokens."""
        inputs: list[EnvInput] = []
        for output in lm_outputs:
            conversation = self._conversations[output.env_id]
            pending = conversation.pending
            if pending is None:
                raise ValueError(f"{conversation.key}: got a reply that was not requested")
            conversation.pending = None
            completion = admit_completion(output.completion)
            ids = completion.ids
            ended = completion.finish_reason == "stop" and self.renderer.is_special(ids[-1])
            conversation.reply_end = self.renderer.token_text(ids[-1]) if ended else ""
            conversation.num_ids += len(pending.new_ids) + len(ids)
            text = clean_text(self.response_prefix + self.renderer.decode(ids))
            conversation.blocks.append([Message(role="assistant", content=text)])
            conversation.said.append((conversation.played, conversation.reply_end))
            conversation.played += 1
            inputs.append(
                EnvInput(
                    env_id=output.env_id,
                    text=text,
                    completion=completion,
                    prompt_ids=pending.new_ids,
                    restart=pending.restart,
                    context_full=pending.context_bound and completion.finish_reason == "length",
                    seconds=output.seconds,
                    start=output.start,
                    parent=pending.parent,
                    decode=self.renderer.decode,
                )
            )
        return inputs

    def final_ids(
        self, env_id: int, messages: Sequence[Message], rewritten: Observation | None = None
    ) -> tuple[int, ...]:
        """Ids of the environment's last messages after a truncated episode's last reply, for the
        critic's value of the final state. Empty if they do not fit, or if the template or the
        environment rewrote history."""
        conversation = self._conversations[env_id]
        if not messages or rewritten is not None or len(conversation.blocks) < 2:
            return ()
        block = conversation.blocks[-1]
        before = len(block)
        block.extend(messages)
        try:
            self._refuse_long(conversation)
            _, text = self._continuation(conversation)
            used = conversation.num_ids
            ids = () if text is None else self._encode(conversation, text, used=used)
        except ContextOverflowError:
            return ()
        finally:
            del block[before:]
        return ids if conversation.num_ids + len(ids) <= self._max_context else ()

    def formulate_rollouts(
        self, rollout: Sequence[Episode] | Sequence[EnvOutput], *, pad_id: int = 0
    ) -> Batch:
        """A rollout as one training batch, failed episodes left out.

        Args:
            rollout: episodes, or the states of environments that are all over
                (`EnvStateManager.get_rollout_states`).
        """
        episodes = [item if isinstance(item, Episode) else self._episode(item) for item in rollout]
        usable = [episode for episode in episodes if episode.turns and not episode.status.failed]
        if not usable:
            raise ValueError(
                f"none of the {len(episodes)} episodes can be trained on; see their status and "
                "error"
            )
        return collate(
            [sample for episode in usable for sample in episode_to_samples(episode)], pad_id=pad_id
        )

    def _episode(self, output: EnvOutput) -> Episode:
        """The episode of an environment that is over, with the last words of a truncated one."""
        episode, env_id = output["episode"], output["env_id"]
        if episode is None:
            raise ValueError(
                f"{output['episode_id']} is not over: give its replies to `step` until `done`"
            )
        if episode.status is not Status.TRUNCATED_TURNS or episode.final_ids:
            return episode
        if not self._talks(env_id, episode.id):
            return episode
        last = episode.turns[-1]
        ids = self.final_ids(env_id, last.messages, last.rewritten)
        return replace(episode, final_ids=ids)

    def _talks(self, env_id: int, key: str) -> bool:
        """True where the environment's conversation is that of this episode."""
        conversation = self._conversations.get(env_id)
        return conversation is not None and conversation.key == key

    def _encode(self, conversation: _Conversation, text: str, *, used: int) -> tuple[int, ...]:
        """The ids of a rendered text and of the response prefix."""
        self._refuse(conversation, text, used=used)
        return self.renderer.encode(text + self.response_prefix)

    def _refuse_long(self, conversation: _Conversation) -> None:
        """Raises if a new message is longer than the context, before it is rendered."""
        for message in conversation.blocks[-1]:
            self._refuse(conversation, message.content, used=conversation.num_ids)

    def _refuse(self, conversation: _Conversation, text: str, *, used: int) -> None:
        """Raises if a text is longer than the context. Of one that is far too long, only the
        beginning is tokenised."""
        size = CHARS_PER_ID * self._max_context
        while len(text) >= 2 * size:
            count = len(self.renderer.encode(text[:size]))
            if count > self._max_context:
                needed = f"more than {count} (text of {len(text)} characters)"
                raise self._overflow(conversation, needed, used=used)
            size *= 2

    def _overflow(
        self, conversation: _Conversation, needed: str, *, used: int
    ) -> ContextOverflowError:
        what = "the opening" if len(conversation.blocks) == 1 else "the next observation"
        taken = f", {used} of them used" if used else ""
        return ContextOverflowError(
            f"{conversation.key}: {what} needs {needed} tokens and the reply at least 1; the "
            f"context holds {self._max_context}{taken}. Raise rollout.max_context, shorten the "
            "environment's messages, or use a window"
        )

    def _window_start(self, num_blocks: int) -> int:
        match self._config.window:
            case "full":
                return 0
            case "last_k":
                return max(0, num_blocks - 1 - self._config.window_turns)
            case "single_turn":
                return num_blocks - 1

    def _window(self, conversation: _Conversation, start: int) -> list[Message]:
        """The opening's system messages, then all messages from the environment's part of block
        `start` on."""
        if start == 0:
            return [message for block in conversation.blocks for message in block]
        system = [message for message in conversation.blocks[0] if message.role == "system"]
        first = [message for message in conversation.blocks[start] if message.role != "assistant"]
        later = [message for block in conversation.blocks[start + 1 :] for message in block]
        return [*system, *first, *later]

    def _continuation(self, conversation: _Conversation) -> tuple[Rendered, str | None]:
        """(the rendering of the same window with its last block, the text after the reply in it or
        None)."""
        before, block, end = conversation.rendered, conversation.blocks[-1], conversation.reply_end
        if before is None:
            raise ValueError(f"{conversation.key}: got a reply before the first prompt")

        def window() -> list[Message]:
            return self._window(conversation, conversation.window_start)

        tools, key = conversation.tools, conversation.tools_key
        extended = self.renderer.extend(before, block, tools, key=key, end=end, window=window)
        if extended is not None:
            return extended
        rendered = self.renderer.render(window(), tools, key=key)
        return rendered, self.renderer.continuation(
            before.text, block[0].content, rendered.text, end=end
        )


def _session(conversation: _Conversation) -> Session:
    number = conversation.contexts - 1
    return Session(
        key=f"{conversation.key}#{number}", seed=derive_seed(conversation.seed, "context", number)
    )


def _last_messages(output: EnvOutput) -> list[Message]:
    if len(output["history"]) < 2:
        return []  # the opening was given to `open`
    return _messages(output["history"][-1])


def _messages(entry: HistoryEntry) -> list[Message]:
    return [Message.from_json(message) for message in entry.get("messages", [])]


def _last_rewritten(output: EnvOutput) -> Observation | None:
    found = output["history"][-1].get("rewritten")
    return None if found is None else Observation.from_json(found)
