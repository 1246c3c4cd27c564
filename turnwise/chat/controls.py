"""Prevents text from environments and tools from forging special tokens or control strings.

Special tokens (end of turn, padding) and control strings (`</think>`, `<tool_call>`) are valid only
if the template writes them or the model samples them. In all other text they are split by an
invisible character, so that they stay plain text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast, get_args

from jinja2 import Environment, TemplateError, nodes

from turnwise.chat.spellings import Spellings
from turnwise.chat.template import EXTENSIONS
from turnwise.types import Json, Message, Role

Where = Literal["observations", "all", "none"]
"""Where control strings are split. Special tokens are split everywhere."""

_KNOWN = tuple(
    f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/")
)
_TAG = re.compile(r"</?[\w|=:.\uff5c\u2581-]{1,60}>|\[/?[A-Z_]{2,40}\]")
"""Strings in a template's source that look like control strings."""
_TOKEN = re.compile(r"<[|\uff5c].+[|\uff5c]>")
"""Added tokens of this form are control strings, whether the template writes them or not."""
_STRUCTURE = frozenset(get_args(Role)) | frozenset(
    [
        "role",
        "content",
        "tool_calls",
        "tool_call_id",
        "id",
        "type",
        "function",
        "name",
        "arguments",
        "description",
        "parameters",
        "properties",
        "required",
        "enum",
        "items",
        "default",
        "title",
        "object",
        "array",
        "string",
        "integer",
        "number",
        "boolean",
        "null",
        "anyOf",
        "oneOf",
        "allOf",
        "additionalProperties",
    ]
)
"""Words of messages and JSON Schema that templates compare with. They are never fenced."""
_BREAKS = ("\u200b", " ")
"""Zero-width space; a plain space for tokenizers that drop the former."""


class Controls:
    """Special tokens and control strings of one tokenizer and template.

    Example:
        >>> class Tokenizer:
        ...     chat_template = "{{ messages[0].content }}<end>"
        ...     added_tokens_decoder = {}
        >>> controls = Controls(Tokenizer(), encode=lambda text: [], specials={7: "<|end|>"})
        >>> print(ascii(controls.text("<|end|></think>", role="user")))
        '<\\u200b|end|><\\u200b/think>'
        >>> print(ascii(controls.text("<|end|></think>", role="assistant")))
        '<\\u200b|end|></think>'
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        encode: Callable[[str], Sequence[int]],
        specials: Mapping[int, str],
        where: Where = "observations",
        own: Sequence[str] = (),
    ) -> None:
        """`specials` are the texts of special tokens by id; `own` are texts of turnwise that
        contain control strings and stay unchanged."""
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        # A token of one character cannot be split. It is an ordinary character used as padding, and
        # does not end a turn.
        self._specials = _longest_first(text for text in specials.values() if len(text) > 1)
        source = str(tokenizer.chat_template)
        strings = {*_KNOWN, *_TAG.findall(source)}
        strings |= {str(token) for token in added.values() if _TOKEN.fullmatch(str(token))}
        self._strings = _longest_first(strings - set(self._specials) if where != "none" else ())
        self._where = where
        self._own = re.compile("|".join(map(re.escape, own)) or r"(?!)")
        every = _longest_first((*self._specials, *self._strings))
        self._any_special, self._any = _pattern(self._specials), _pattern(every)
        self._spellings = Spellings(
            tokenizer, encode=encode, specials=specials, strings=self._strings
        )
        self.normalised = self._spellings.active
        """True if the tokenizer reads other characters as control strings, too."""
        if self.normalised:
            every = _longest_first((*every, *map(self._spellings.normalise, every)))
        self._heads = {text[:end] for text in every for end in range(1, len(text))}
        self._tails = {text[start:] for text in every for start in range(1, len(text))}
        self._all = "\0".join(every)
        self._longest = max(map(len, every), default=0)
        self._jagged = self._has_jagged_text(source)
        self._encode, self._special_ids = encode, frozenset(specials)
        self._break = self._choose_break()

    def text(self, text: str, *, role: str) -> str:
        """The content of a message of this role, cleaned for rendering."""
        kept = ("assistant",) if self._where == "all" else ("assistant", "system")
        return self._clean(text, strings=role not in kept)

    def message(self, message: Message) -> dict[str, Json]:
        """The message as a dict for templates, with all texts cleaned."""
        content = self.text(message.content, role=message.role)
        data: dict[str, Json] = {"role": message.role, "content": content}
        rest = {key: item for key, item in message.to_json().items() if key not in data}
        return data | cast(dict[str, Json], self.value(rest))

    def value(self, value: Json) -> Json:
        """Cleaned JSON, keys included: a tool's schema, the calls in a message."""
        return _map_texts(value, lambda text: self._clean(text, strings=True))

    def found(self, text: str) -> list[str]:
        """The special tokens and control strings of a rendering, in order."""
        found = self._any.findall(text)
        return found + self._spellings.marks(text) if self.normalised else found

    def may_join(self, values: Sequence[Json]) -> bool:
        """True if a cleaned text could form a control string together with adjacent text of the
        template."""
        texts = {text for value in values for text in _texts(value)} - _STRUCTURE - {""}
        if any(self._ends_open(text) or self._merges(text) for text in texts):
            return True
        return self._jagged and any(
            self._starts_open(text) or self._is_within(text) for text in texts
        )

    def fence(self, value: Json) -> Json:
        """The same value, with a break around every text that could be part of a control string."""

        def apart(text: str) -> str:
            if not text or text in _STRUCTURE:
                return text
            open_ = self._ends_open(text) or self._starts_open(text) or self._is_within(text)
            return self._break + text + self._break if open_ or self._merges(text) else text

        return _map_texts(value, apart)

    def solid(self, pieces: Sequence[str]) -> bool:
        """True if content between these texts of a template can never form a control string with
        them."""
        inner = pieces[1:-1]
        return (
            not any(self._ends_open(piece) for piece in pieces[:-1])
            and not any(self._starts_open(piece) for piece in pieces[1:])
            and not any(piece in self._all for piece in inner)
        )

    def _clean(self, text: str, *, strings: bool) -> str:
        if (self._any if strings else self._any_special).search(text) is not None:
            text = self._broken(text, self._specials)
            if strings:
                text = self._beside_own(text, lambda part: self._broken(part, self._strings))
        if self.normalised:
            split = self._spellings.broken
            text = split(text, self._break, strings=False)
            if strings:
                text = self._beside_own(text, lambda part: split(part, self._break, strings=True))
        return text

    def _beside_own(self, text: str, change: Callable[[str], str]) -> str:
        """The text with everything changed that is not turnwise's own."""
        own = self._own.findall(text)
        others = map(change, self._own.split(text))
        return "".join(part for pair in zip(others, [*own, ""], strict=True) for part in pair)

    def _broken(self, text: str, controls: Sequence[str]) -> str:
        for control in controls:
            while control in text:
                text = text.replace(control, control[0] + self._break + control[1:])
        return text

    def _choose_break(self) -> str:
        if self.normalised:
            for sign in _BREAKS:
                controls = (*self._specials, *self._strings)
                text = "\n".join(control[0] + sign + control[1:] for control in controls)
                if self._spellings.safe(text, strings=True):
                    return sign
        for sign in _BREAKS:
            text = "".join(control[0] + sign + control[1:] for control in self._specials)
            if self._special_ids.isdisjoint(self._encode(text)):
                return sign
        raise ValueError(
            "the tokenizer recognises special tokens even with a space inside "
            "them, so an environment could forge a turn; use another tokenizer"
        )

    def _ends_open(self, text: str) -> bool:
        """True if the text ends with the beginning of a control string."""
        ends = [one[-self._longest :] for one in self._read(text)]
        return any(end[start:] in self._heads for end in ends for start in range(len(end)))

    def _starts_open(self, text: str) -> bool:
        """True if the text begins with the end of a control string."""
        starts = [one[: self._longest] for one in self._read(text)]
        return any(
            start[:end] in self._tails for start in starts for end in range(1, len(start) + 1)
        )

    def _is_within(self, text: str) -> bool:
        """True if the text is a part of a control string."""
        return any(one in self._all for one in self._read(text))

    def _merges(self, text: str) -> bool:
        return self.normalised and self._spellings.merges(text)

    def _read(self, text: str) -> tuple[str, ...]:
        """The text, and as the tokenizer reads it if that may differ."""
        return (text, self._spellings.normalise(text)) if self.normalised else (text,)

    def _has_jagged_text(self, source: str) -> bool:
        """True if some text of the template begins or ends within a control string, as in `'<' ~
        key ~ '>'`."""
        try:
            tree = Environment(extensions=list(EXTENSIONS)).parse(source)
        except TemplateError:
            return True
        texts = [str(node.data) for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return any(self._ends_open(text) or self._starts_open(text) for text in texts)


def _longest_first(texts: Any) -> list[str]:
    return sorted(set(texts), key=lambda text: (-len(text), text))


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _map_texts(value: Json, change: Callable[[str], str]) -> Json:
    match value:
        case str():
            return change(value)
        case Mapping():
            items = cast(Mapping[Any, Json], value).items()
            return {_map_texts(key, change): _map_texts(item, change) for key, item in items}
        case list() | tuple():
            return [_map_texts(item, change) for item in cast(Sequence[Json], value)]
        case _:
            return value


def _texts(value: Json) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for pair in cast(Mapping[Any, Json], value).items():
                yield from _texts(pair)
        case list() | tuple():
            for item in cast(Sequence[Json], value):
                yield from _texts(item)
        case _:
            return
