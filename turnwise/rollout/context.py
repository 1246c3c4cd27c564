"""ContextManager: messages <-> token ids. It extends a prefix and never re-tokenises what the model said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.chat.render import Rendered, Renderer, Tokenizer, tools_key
from turnwise.config.schema import RolloutConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.generate.base import ContextOverflowError, Session
from turnwise.rollout.outputs import EnvInput, EnvOutput, LmInput, LmOutput
from turnwise.seeding import derive_seed
from turnwise.types import Episode, Json, Message


@dataclass(slots=True)
class _Conversation:
    """What one episode said and saw. Blocks: the opening, then (reply, the environment's answer) for every turn."""

    key: str
    seed: int
    tools: tuple[Mapping[str, Json], ...]
    tools_key: str
    blocks: list[list[Message]] = field(default_factory=list[list[Message]])
    rendered: Rendered | None = None  # the rendering that the last reply answered
    window_start: int = 0  # first block of the context that the model is in
    num_ids: int = 0  # ids in the session
    contexts: int = 0
    session: Session | None = None  # of the last context
    reply_end: str = ""  # text of the end-of-turn token that the last reply ended in
    pending: LmInput | None = None


class ContextManager:
    """Turns environment outputs into what the model reads, and the model's tokens into what the environment reads.

    Windows: `full` shows everything; `last_k` the opening system message and the last k turns; `single_turn` only the
    system message and the current state. A window that moves starts a new context, and so does a chat template that
    rewrites history; otherwise only new ids are sent. A `response_prefix` ends what the model reads and begins what
    the environment reads.
    """

    def __init__(self, tokenizer: Tokenizer, config: RolloutConfig, *, max_context: int) -> None:
        self.renderer = Renderer(tokenizer)
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
        """Starts a conversation (anew, if the environment had one)."""
        conversation = _Conversation(key=key, seed=seed, tools=tuple(tools), tools_key=tools_key(tools))
        conversation.blocks.append(list(prompt))
        self._conversations[env_id] = conversation

    def close(self, env_id: int) -> Session | None:
        """Forgets a conversation; returns the session that it holds, to be released."""
        conversation = self._conversations.pop(env_id, None)
        return None if conversation is None else conversation.session

    def get_lm_inputs(self, env_outputs: Sequence[EnvOutput]) -> list[LmInput]:
        """What the model must read next, for every environment that waits for a reply.

        Raises:
            ContextOverflowError: for a conversation that has no room left (ask one at a time to know which).
        """
        inputs: list[LmInput] = []
        for output in env_outputs:
            if not output["done"]:
                inputs.append(self.next_input(output["env_id"], _last_messages(output)))
        return inputs

    def next_input(self, env_id: int, messages: Sequence[Message]) -> LmInput:
        """The next input of one conversation, whose environment has just said `messages`."""
        conversation = self._conversations[env_id]
        conversation.blocks[-1].extend(messages)
        start = self._window_start(len(conversation.blocks))
        old = conversation.session
        if old is not None and start == conversation.window_start:
            rendered, text = self._continuation(conversation)
        else:
            window = self._window(conversation, start)
            rendered, text = self.renderer.render(window, conversation.tools, key=conversation.tools_key), None
        restart = text is None
        ids = self.renderer.encode((rendered.text if text is None else text) + self.response_prefix)
        used = 0 if restart else conversation.num_ids
        room = self._max_context - used - len(ids)
        if room < 1:  # nothing has changed yet: the session that is there is still to be released
            raise ContextOverflowError(
                f"{conversation.key}: the context holds {self._max_context} ids; {used} are used and "
                f"{len(ids)} more leave no room for a reply; raise rollout.max_context or use a window"
            )
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

    def get_env_inputs(self, lm_outputs: Sequence[LmOutput]) -> list[EnvInput]:
        """The replies as the environments read them, each with the tokens that it was."""
        inputs: list[EnvInput] = []
        for output in lm_outputs:
            conversation = self._conversations[output.env_id]
            pending = conversation.pending
            if pending is None:
                raise ValueError(f"{conversation.key}: a reply came, but none was asked for")
            conversation.pending = None
            ids = output.completion.ids
            ended = output.completion.finish_reason == "stop" and self.renderer.is_special(ids[-1])
            conversation.reply_end = self.renderer.token_text(ids[-1]) if ended else ""
            conversation.num_ids += len(pending.new_ids) + len(ids)
            text = self.response_prefix + self.renderer.decode(ids)
            conversation.blocks.append([Message(role="assistant", content=text)])
            inputs.append(
                EnvInput(
                    env_id=output.env_id,
                    text=text,
                    completion=output.completion,
                    prompt_ids=pending.new_ids,
                    restart=pending.restart,
                    context_full=pending.context_bound and output.completion.finish_reason == "length",
                    seconds=output.seconds,
                )
            )
        return inputs

    def final_ids(self, env_id: int, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the environment's last words after a truncated episode's last reply, for the critic to value the
        state they lead to. Empty where they do not fit or the template rewrote history."""
        conversation = self._conversations[env_id]
        if not messages or len(conversation.blocks) < 2:
            return ()
        conversation.blocks[-1].extend(messages)
        _, text = self._continuation(conversation)
        ids = () if text is None else self.renderer.encode(text + self.response_prefix)
        return ids if conversation.num_ids + len(ids) <= self._max_context else ()

    def formulate_rollouts(self, episodes: Sequence[Episode], *, pad_id: int = 0) -> Batch:
        """The episodes as one training batch, failed ones left out."""
        usable = [episode for episode in episodes if episode.turns and not episode.status.failed]
        if not usable:
            raise ValueError(f"none of the {len(episodes)} episodes can be trained on; see their status and error")
        return collate([sample for episode in usable for sample in episode_to_samples(episode)], pad_id=pad_id)

    def _window_start(self, num_blocks: int) -> int:
        match self._config.window:
            case "full":
                return 0
            case "last_k":
                return max(0, num_blocks - 1 - self._config.window_turns)
            case "single_turn":
                return num_blocks - 1

    def _window(self, conversation: _Conversation, start: int) -> list[Message]:
        """The messages from the environment's words of block `start` on, after the opening's system messages."""
        if start == 0:
            return [message for block in conversation.blocks for message in block]
        system = [message for message in conversation.blocks[0] if message.role == "system"]
        first = [message for message in conversation.blocks[start] if message.role != "assistant"]
        later = [message for block in conversation.blocks[start + 1 :] for message in block]
        return [*system, *first, *later]

    def _continuation(self, conversation: _Conversation) -> tuple[Rendered, str | None]:
        """(the rendering of the same window with its last block, what follows the reply in it or None)."""
        before, block, end = conversation.rendered, conversation.blocks[-1], conversation.reply_end
        if before is None:
            raise ValueError(f"{conversation.key}: a reply came before anything was rendered")

        def window() -> list[Message]:
            return self._window(conversation, conversation.window_start)

        tools, key = conversation.tools, conversation.tools_key
        extended = self.renderer.extend(before, block, tools, key=key, end=end, window=window)
        if extended is not None:
            return extended
        rendered = self.renderer.render(window(), tools, key=key)
        return rendered, self.renderer.continuation(before.text, block[0].content, rendered.text, end=end)


def _session(conversation: _Conversation) -> Session:
    number = conversation.contexts - 1
    return Session(key=f"{conversation.key}#{number}", seed=derive_seed(conversation.seed, "context", number))


def _last_messages(output: EnvOutput) -> list[Message]:
    if len(output["history"]) < 2:
        return []  # the opening was given to `open`
    return [Message.from_json(message) for message in output["history"][-1].get("messages", [])]
