"""Messages -> token ids through any chat template, without re-tokenising the model's replies."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from turnwise.chat.codec import EncodeCache, byte_table, table_decode
from turnwise.chat.controls import Controls, Where
from turnwise.chat.shapes import CHECK_EVERY, Roles, Shapes
from turnwise.chat.template import read_template
from turnwise.chat.tool_calls import Form, form_of_calls, in_form
from turnwise.types import Json, Message

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that turnwise uses."""

    chat_template: Any
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


_MAX_OPENINGS = 512


@dataclass(kw_only=True, slots=True)
class Rendered:
    """A conversation as text, ready for the model's reply."""

    text: str
    roles: Roles | None = None
    """Roles of its messages, if every message passes through the template unchanged; else None."""
    epoch: int = 0
    """The epoch of the shapes when it was rendered."""


def tools_key(tools: Sequence[Mapping[str, Json]]) -> str:
    """A key for a list of tool schemas. The order counts, because templates keep it.

    Example:
        >>> tools_key(()), tools_key([{"name": "add"}])
        ('', '[{"name": "add"}]')
    """
    return json.dumps([dict(tool) for tool in tools], default=repr) if tools else ""


class Renderer:
    """Renders conversations with the tokenizer's chat template.

    A continuation is the difference of two renderings, so any template works. If a template
    rewrites history (Qwen3 drops earlier thinking), there is no such difference, and the caller
    starts a new context.

    Rendering is the slowest part between two replies. If a template provably puts contents between
    constant texts that depend only on the roles (see template.py), those texts are learned once and
    then joined. Samples are compared with the template's own rendering; after a difference, the
    template renders everything.

    Special tokens in the text of environments and tools stay plain text, and so do control strings,
    as `break_control` says (see controls.py). Calls of tools that a template would leave out are
    written into the content (see tool_calls.py). `own` are texts of turnwise that contain control
    strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        break_control: Where = "observations",
        own: Sequence[str] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so messages cannot become tokens; "
                "set model.chat_template to a Jinja template or to the path of one"
            )
        self._tokenizer = tokenizer
        marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = marked | set(tokenizer.all_special_ids)
        self._special_texts = {index: self._token_text(index) for index in self._special_ids}
        self._merge_system = False
        self._core = self._fast_core()
        self._bytes = None if self._core is None else byte_table(self._core)
        self._encoded = EncodeCache()
        self._template = tokenizer.chat_template
        self._calls: Form | None = None
        self._break_control: Where = break_control
        self._own = tuple(own)
        self._controls = self._read_controls()
        self._shapes = self._learnable()
        self._openings: dict[tuple[tuple[Message, ...], str], str] = {}
        fixed = _renders_by_template(tokenizer) and not re.search(
            "strftime_now|random|lipsum", self._template
        )
        self._keeps_openings = fixed

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> str:
        """The whole conversation as text, ready for the model's reply."""
        return self.render(messages, tools, key=tools_key(tools)).text

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]], *, key: str
    ) -> Rendered:
        """The whole conversation, ready for the model's reply. `key` is the tools' `tools_key`."""
        shapes = self._live_shapes()
        if shapes is not None and all(map(shapes.plain, messages)):
            roles = tuple([message.role for message in messages])
            shape = shapes.shape(roles, tools, key)
            if shape is not None:
                text = shape.fill([message.content for message in messages])
                shape.uses += 1
                if shape.uses % CHECK_EVERY != 1 or self._agrees(text, messages, tools):
                    return Rendered(text=text, roles=roles, epoch=shapes.epoch)
        return Rendered(text=self._opening(messages, tools, key))

    def extend(
        self,
        before: Rendered,
        block: Sequence[Message],
        tools: Sequence[Mapping[str, Json]],
        *,
        key: str,
        end: str,
        window: Callable[[], Sequence[Message]],
    ) -> tuple[Rendered, str] | None:
        """(the rendering with a further block, the text after the reply in it) by joining strings.
        None if that may not be exact; the caller then uses `render` and `continuation`.

        Args:
            block: the reply to `before`, then the environment's messages.
            end: text of the end-of-turn token, if the model sampled it.
            window: the whole conversation, to compare the result with the template's own rendering.
        """
        shapes = self._live_shapes()
        if shapes is None or before.roles is None or before.epoch != shapes.epoch:
            return None
        if not all(map(shapes.plain, block)):
            return None
        tail = shapes.tail(
            before.roles, tuple([message.role for message in block]), tools, key, end=end
        )
        if tail is None:
            return None
        contents = [message.content for message in block[1:]]
        whole = before.text + block[0].content + tail.whole.fill(contents)
        tail.uses += 1
        if tail.uses % CHECK_EVERY == 1 and not self._agrees(whole, window(), tools):
            return None
        return Rendered(text=whole, roles=tail.roles, epoch=before.epoch), tail.sent.fill(contents)

    def _opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]], key: str
    ) -> str:
        """The template's rendering, cached if it has no reply: groups share their opening
        messages."""
        if not self._keeps_openings or any(message.role == "assistant" for message in messages):
            return self._render(messages, tools)
        known = (tuple(messages), key)
        text = self._openings.get(known)
        if text is None:
            if len(self._openings) >= _MAX_OPENINGS:
                self._openings.clear()
            text = self._openings[known] = self._render(messages, tools)
        return text

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]) -> str:
        """The conversation as the template itself renders it."""
        controls = self._controls
        cleaned = [self._cleaned(message) for message in messages]
        schemas = [cast(dict[str, Json], controls.value(tool)) for tool in tools]
        text = self._render_cleaned(cleaned, schemas)
        if controls.may_join([*cleaned, *schemas]):
            fenced = self._render_cleaned(
                [controls.fence(message) for message in cleaned],
                [controls.fence(schema) for schema in schemas],
            )
            if controls.found(fenced) != controls.found(text):
                return fenced
        return text

    def _cleaned(self, message: Message) -> dict[str, Json]:
        data = self._controls.message(message)
        if not message.tool_calls:
            return data
        if self._calls is None:
            self._calls = form_of_calls(self._apply)
        return in_form(data, self._calls, clean=self._controls.value)

    def _render_cleaned(
        self, messages: Sequence[dict[str, Json]], tools: Sequence[dict[str, Json]]
    ) -> str:
        if self._merge_system:
            messages = _merge_system(messages)
        try:
            return self._apply(messages, tools)
        except Exception as error:
            # Some templates (Gemma) refuse a system message: put it at the start of the first user
            # message.
            if self._merge_system or not any(message["role"] == "system" for message in messages):
                raise ValueError(
                    f"the chat template failed on this conversation: {error}"
                ) from error
            text = self._apply(_merge_system(messages), tools)
            logger.warning(
                "the chat template refuses system messages: they go into the first user message"
            )
            self._merge_system = True
            self._openings.clear()
            if self._shapes is not None:
                self._shapes.forget()
                if any("\n" in literal for literal in self._shapes.rules.literals):
                    # A literal may span the two joined contents, although neither contains it.
                    self._shapes = None
            return text

    def continuation(self, before: str, reply: str, after: str, *, end: str = "") -> str | None:
        """The text after the model's reply in the rendering of the longer conversation; None if the
        template changed the text before it.

        Args:
            before: the rendering that the model replied to.
            reply: the reply's text, without special tokens.
            after: the rendering of the conversation with the reply and the messages after it.
            end: text of the end-of-turn token, if the model sampled it (it is in its ids already).
        """
        if not after.startswith(before):
            return None
        # Templates may trim a reply's ends. The model's ids still stay unchanged.
        rest = after[len(before) :].lstrip()
        said = self._controls.text(reply, role="assistant")
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
        """The ids of a text, including its special tokens."""
        ids = self._encoded.get(text)
        if ids is None:
            if self._core is not None:
                ids = tuple(self._core.encode(text, add_special_tokens=False).ids)
            else:
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
            self._encoded.put(text, ids)
        return ids

    def reply_ids(self, text: str) -> tuple[int, ...]:
        """The ids of a reply that is given as text. Special tokens in it are plain text."""
        return self.encode(self._controls.text(text, role="assistant"))

    def turn_end(self) -> int | None:
        """The special token that the template writes after a reply; None if there is none."""
        asked, said = Message(role="user", content="a"), Message(role="assistant", content="b")
        try:
            before, after = self.prompt([asked]), self.prompt([asked, said, asked])
        except ValueError:  # this template refuses so short a conversation
            return None
        rest = (self.continuation(before, said.content, after) or "").lstrip()
        named = sorted(self._special_texts.items(), key=lambda one: -len(one[1]))
        return next((index for index, text in named if text and rest.startswith(text)), None)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens."""
        if self._bytes is not None:
            return table_decode(self._bytes, self._core, ids)
        if self._core is not None:
            return self._core.decode(list(ids), skip_special_tokens=True)
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _fast_core(self) -> Any:
        """The tokenizer's Rust core, which is twice as fast as its wrapper; None if the two
        disagree."""
        core = getattr(self._tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        text = (
            "Turn 1:\n P _ <answer>up || down</answer> , . 'tis"
            + "".join(self._special_texts.values())
            + " \u00e9\n"
        )
        ids = list(core.encode(text, add_special_tokens=False).ids)
        same = ids == list(self._tokenizer.encode(text, add_special_tokens=False))
        plain = core.decode(ids, skip_special_tokens=True) == self._tokenizer.decode(
            ids, skip_special_tokens=True
        )
        return core if same and plain else None

    def _read_controls(self) -> Controls:
        return Controls(
            self._tokenizer,
            encode=self.encode,
            specials=self._special_texts,
            where=self._break_control,
            own=self._own,
        )

    def _learnable(self) -> Shapes | None:
        if not _renders_by_template(self._tokenizer) or self._controls.normalised:
            return None
        rules = read_template(self._template)
        if rules is None:
            return None
        return Shapes(rules=rules, render=self._render, controls=self._controls)

    def _live_shapes(self) -> Shapes | None:
        if self._tokenizer.chat_template is not self._template:
            self._template = self._tokenizer.chat_template
            self._calls = None
            self._openings.clear()
            self._keeps_openings = False
            self._controls = self._read_controls()
            self._shapes = self._learnable()
        if self._shapes is not None:
            self._shapes.refresh()
        return self._shapes

    def _agrees(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]]
    ) -> bool:
        """True if the template renders the same text. After a difference, shapes are no longer
        used."""
        if self._render(messages, tools) == text:
            return True
        logger.warning(
            "the fast rendering differs from the chat template; from now on the template renders "
            "every turn"
        )
        self._shapes = None
        return False

    def token_text(self, token_id: int) -> str:
        """The text of a special token in a rendering."""
        return self._special_texts.get(token_id) or self._token_text(token_id)

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _apply(self, messages: Sequence[dict[str, Json]], tools: Sequence[dict[str, Json]]) -> str:
        rendered = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=False,
        )
        return cast(str, rendered)


def _renders_by_template(tokenizer: Tokenizer) -> bool:
    """True if transformers renders a single Jinja template and the tokenizer does not override
    it."""
    owner = next(
        (cls for cls in type(tokenizer).__mro__ if "apply_chat_template" in vars(cls)), None
    )
    usual = owner is not None and owner.__module__ == "transformers.tokenization_utils_base"
    return (
        usual
        and "apply_chat_template" not in vars(tokenizer)
        and isinstance(tokenizer.chat_template, str)
    )


def _merge_system(messages: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not system or not others:
        return list(others)
    first = {**others[0], "content": "\n\n".join([*system, others[0]["content"]])}
    return [first, *others[1:]]
