"""Control strings in other letters: a tokenizer that normalises text (NFKC, lower case, without
accents) reads fullwidth signs as `<|end|>`."""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_REPLACED = "\ufffd"
_WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
_SIGNS = str.maketrans({"K": "\u212a", ";": "\u037e", "`": "\u1fef"})
"""The only characters from which NFC makes ASCII."""


class Spellings:
    """Finds and splits control strings in text as one tokenizer normalises it."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        encode: Callable[[str], Sequence[int]],
        specials: Mapping[int, str],
        strings: Sequence[str],
    ) -> None:
        """`specials` are the texts of special tokens by id, `strings` the other control strings."""
        core = getattr(tokenizer, "backend_tokenizer", None)
        normalizer = getattr(core, "normalizer", None)
        self._encode = encode
        self.normalise: Callable[[str], str] = str.__str__
        """What the tokenizer makes of a text before it looks for words in it."""
        if normalizer is not None:
            self.normalise = normalizer.normalize_str
        elif core is None and getattr(tokenizer, "do_lower_case", False):
            self.normalise = str.lower
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        self._special_ids = frozenset(index for index, text in specials.items() if len(text) > 1)
        self._ids = self._special_ids | {
            index for index, token in added.items() if str(token) in strings
        }
        texts = [specials[index] for index in self._special_ids]
        self._special, self._any = self._pattern(texts), self._pattern([*texts, *strings])
        self.active = self.normalise is not str.__str__ and (
            any(added[index].normalized for index in self._ids if index in added)
            or any(map(self._is_read_in_other_letters, (*texts, *strings)))
        )
        """False if no other letters are read as a control string."""

    def safe(self, text: str, *, strings: bool) -> bool:
        """True if the tokenizer reads no special token in the text, nor, with `strings`, another
        control string."""
        ids, pattern = (self._ids, self._any) if strings else (self._special_ids, self._special)
        return ids.isdisjoint(self._encode(text)) and pattern.search(self.normalise(text)) is None

    def broken(self, text: str, sign: str, *, strings: bool) -> str:
        """The text with `sign` between all characters of the lines that are not safe."""
        if self.safe(text, strings=strings):
            return text

        def split(line: str) -> str:
            return sign.join(self._letter(one, sign, strings=strings) for one in line)

        lines = text.splitlines(keepends=True)
        whole = "".join(line if self.safe(line, strings=strings) else split(line) for line in lines)
        return whole if self.safe(whole, strings=strings) else split(text)

    def marks(self, text: str) -> list[str]:
        """The control strings and tokens that the tokenizer reads in a text."""
        tokens = [str(index) for index in self._encode(text) if index in self._ids]
        return self._any.findall(self.normalise(text)) + tokens

    def merges(self, text: str) -> bool:
        """True if the first character may become one with whatever comes before it."""
        return unicodedata.combining(text[0]) != 0

    def _letter(self, letter: str, sign: str, *, strings: bool) -> str:
        """The character, or what the tokenizer makes of it if that is a whole control string."""
        if self.safe(letter, strings=strings):
            return letter
        apart = sign.join(self.normalise(letter))
        return apart if self.safe(apart, strings=strings) else _REPLACED

    def _pattern(self, texts: Sequence[str]) -> re.Pattern[str]:
        found = {one for text in texts for one in (text, self.normalise(text)) if one}
        ordered = sorted(found, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def _is_read_in_other_letters(self, control: str) -> bool:
        read = self.normalise(control)
        return any(
            other != control and read in self.normalise(other) for other in _spellings(control)
        )


def _spellings(text: str) -> Iterator[str]:
    yield from (text.translate(_WIDE), text.translate(_SIGNS), text.upper(), text.lower())
    yield from (text[0] + sign + text[1:] for sign in ("\u0301", "\u200b", "\0"))
