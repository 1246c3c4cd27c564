"""Messages -> token ids through any chat template, without ever re-tokenising what the model said."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from turnwise.rollout.codec import EncodeCache, byte_table, table_decode
from turnwise.types import Json, Message

logger = logging.getLogger(__name__)
_BREAK = "\u200b"  # zero-width space: keeps the letters of a special token from becoming the token


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turnwise uses."""

    chat_template: Any
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class Renderer:
    """Renders conversations with the tokenizer's chat template.

    A continuation is the difference of two renderings, so any template works; where a template rewrites history (Qwen3
    drops earlier thinking) the difference does not exist, and the caller starts a new context.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so messages cannot become tokens; "
                "set model.chat_template to a Jinja template or to the path of one"
            )
        self._tokenizer = tokenizer
        marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = marked | set(tokenizer.all_special_ids)
        texts = {self.token_text(index) for index in self._special_ids}
        self._specials = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")
        self._merge_system = False
        self._core = self._fast_core()
        self._bytes = None if self._core is None else byte_table(self._core)
        self._encoded = EncodeCache()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> str:
        """The whole conversation as text, ready for the model's reply."""
        cleaned = [self._neutralise(message) for message in messages]
        if self._merge_system:
            cleaned = _merge_system(cleaned)
        try:
            return self._apply(cleaned, tools)
        except Exception as error:
            # Some templates (Gemma) refuse a system message: say it at the start of the first user message.
            if self._merge_system or not any(message.role == "system" for message in cleaned):
                raise ValueError(f"the chat template failed on this conversation: {error}") from error
            text = self._apply(_merge_system(cleaned), tools)
            logger.warning("the chat template refuses system messages: they go into the first user message")
            self._merge_system = True
            return text

    def continuation(self, before: str, reply: str, after: str, *, end: str = "") -> str | None:
        """What follows the model's reply in the rendering of the longer conversation, or None where the template
        changed what came before.

        Args:
            before: the rendering that the model replied to.
            reply: what it said, without special tokens.
            after: the rendering of the conversation with the reply and what came after it.
            end: text of the end-of-turn token, if the model sampled it (it is in its ids already).
        """
        if not after.startswith(before):
            return None
        # Templates may trim a reply's edges. That is not rewriting: the model's ids stay as they are.
        rest = after[len(before) :].lstrip()
        said = self._neutralise_text(reply)
        body = said.strip()
        if not rest.startswith(body):
            return None
        rest = rest[len(body) :]
        trailing = said[len(said.rstrip()) :] if body else ""
        rest = rest.removeprefix(trailing)
        if end:
            stripped = rest.lstrip()
            return stripped[len(end) :] if stripped.startswith(end) else rest
        return rest

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a text, special tokens in it included."""
        ids = self._encoded.get(text)
        if ids is None:
            if self._core is not None:
                ids = tuple(self._core.encode(text, add_special_tokens=False).ids)
            else:
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            self._encoded.put(text, ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        if self._bytes is not None:
            return table_decode(self._bytes, self._core, ids)
        if self._core is not None:
            return self._core.decode(list(ids), skip_special_tokens=True)
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _fast_core(self) -> Any:
        """The tokenizer's Rust core, which is twice as quick as the wrapper around it, where both agree."""
        core = getattr(self._tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        text = "Turn 1:\n P _ <answer>up || down</answer> , . 'tis" + "".join(self._specials) + " \u00e9\n"
        ids = list(core.encode(text, add_special_tokens=False).ids)
        same = ids == list(self._tokenizer.encode(text, add_special_tokens=False))
        plain = core.decode(ids, skip_special_tokens=True) == self._tokenizer.decode(ids, skip_special_tokens=True)
        return core if same and plain else None

    def token_text(self, token_id: int) -> str:
        """The text that one special token has in a rendering."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _apply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [message.to_json() for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return cast(str, rendered)

    def _neutralise(self, message: Message) -> Message:
        text = self._neutralise_text(message.content)
        return message if text is message.content else replace(message, content=text)

    def _neutralise_text(self, text: str) -> str:
        """The text, with special tokens spelled out in it broken up, so that neither an environment nor a model can
        forge a turn. Only what is rendered changes; sampled ids are never touched."""
        if self._any_special.search(text) is None:
            return text
        for token in self._specials:
            if token in text:
                text = text.replace(token, token[0] + _BREAK + token[1:])
        return text


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    system = [message.content for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    if not system or not others:
        return list(others)
    first = replace(others[0], content="\n\n".join([*system, others[0].content]))
    return [first, *others[1:]]
