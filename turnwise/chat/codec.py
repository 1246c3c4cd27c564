"""Fast, exact conversion between text and ids: a cache of repeated texts, and byte tables for
byte-level tokenizers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

CACHED_CHARS = 1_000_000
"""Characters of text in each of the cache's two generations."""
_PROBE = "Turn 1:\n P _ <answer>up || down</answer> , . 'tis \u00e9\u4e16 \U0001f642\n"


class EncodeCache:
    """The ids of recently encoded texts. Groups share their tasks, so opening messages and many
    observations repeat.

    Two generations bound its size: a text that is looked up moves to the young one; when that is
    full, the old one is dropped.

    Example:
        >>> cache = EncodeCache(limit=4)
        >>> cache.put("up", (1, 2))
        >>> cache.put("left", (3,))
        >>> cache.get("up"), cache.get("left"), cache.get("down")
        ((1, 2), (3,), None)
    """

    def __init__(self, *, limit: int = CACHED_CHARS) -> None:
        self._limit = limit
        self._young: dict[str, tuple[int, ...]] = {}
        self._old: dict[str, tuple[int, ...]] = {}
        self._chars = 0

    def get(self, text: str) -> tuple[int, ...] | None:
        ids = self._young.get(text)
        if ids is None:
            ids = self._old.get(text)
            if ids is not None:
                self.put(text, ids)
        return ids

    def put(self, text: str, ids: tuple[int, ...]) -> None:
        if self._chars + len(text) > self._limit:
            self._old, self._young, self._chars = self._young, {}, 0
        if len(text) <= self._limit:
            self._young[text] = ids
            self._chars += len(text)


class ByteTable(dict[int, bytes]):
    """The bytes of each id, computed on first use. An id whose token is not plain bytes raises
    KeyError."""

    def __init__(self, core: Any, special: Mapping[str, bool]) -> None:
        super().__init__()
        self._core = core
        self._special = special  # text of added tokens -> whether decoding skips them
        self._bytes = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = cast(str | None, self._core.id_to_token(token_id))
        if token is None or token.startswith("<0x"):
            raise KeyError(token_id)
        data = b"" if self._special.get(token) else bytes([self._bytes[sign] for sign in token])
        self[token_id] = data
        return data


def byte_table(core: Any) -> ByteTable | None:
    """The table of a byte-level tokenizer's Rust core; None if its decoder does more than join
    bytes.

    Joining bytes takes a twentieth of the time of the Rust decoder, which creates a string per
    token.
    """
    described = cast(dict[str, Any], json.loads(core.to_str()))
    if not _is_byte_level(described.get("decoder")):
        return None
    added = cast(list[dict[str, Any]], described["added_tokens"])
    table = ByteTable(core, {token["content"]: bool(token["special"]) for token in added})
    ids = list(
        core.encode(
            _PROBE + "".join(token["content"] for token in added), add_special_tokens=False
        ).ids
    )
    samples = (ids, ids[1::2], ids[::-1])  # the last two split multi-byte characters
    return (
        table
        if all(table_decode(table, core, some) == _rust_decode(core, some) for some in samples)
        else None
    )


def table_decode(table: ByteTable, core: Any, ids: Sequence[int]) -> str:
    """The text of ids without special tokens, exactly as the core decodes them."""
    try:
        return b"".join(map(table.__getitem__, ids)).decode("utf-8", "replace")
    except KeyError:  # a token that is not plain bytes may change how its neighbours are decoded
        return _rust_decode(core, ids)


def _rust_decode(core: Any, ids: Sequence[int]) -> str:
    return cast(str, core.decode(list(ids), skip_special_tokens=True))


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """True if tokens in the byte alphabet are decoded by joining their bytes."""
    if decoder is None:
        return False
    if decoder["type"] != "Sequence":
        return decoder["type"] == "ByteLevel"
    *first, last = cast(list[dict[str, Any]], decoder["decoders"])
    return last["type"] == "ByteLevel" and all(_leaves_bytes_alone(step) for step in first)


def _leaves_bytes_alone(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = cast(dict[str, str], step["pattern"]).get("String")
        return pattern is not None and not set(pattern) <= set(_byte_alphabet())
    return step["type"] in ("ByteFallback", "Fuse")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for every byte: printable bytes map to themselves, the others to U+0100 and
    up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
