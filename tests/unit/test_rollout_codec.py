"""Encoding and decoding at the price of a look-up: the same ids and texts as the tokenizer's
own."""

from functools import cache

from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from turnwise.chat.codec import EncodeCache, byte_table, table_decode
from turnwise.chat.render import Renderer
from turnwise.testing.tiny import tiny_tokenizer

GGUF_DECODER = decoders.Sequence(
    [
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Replace("\u2581", " "),
        decoders.ByteLevel(),
    ]
)
SPACE_DECODER = decoders.Sequence([decoders.Replace("e", " "), decoders.ByteLevel()])


@cache
def core(decoder: str) -> Tokenizer:
    """A byte-level BPE with tokens that no byte alphabet writes, and special ones."""
    made = Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(
        ["up || down, the \u4e16\u754c caf\u00e9 <answer>left</answer>"] * 9, trainer
    )
    made.decoder = {"bytes": decoders.ByteLevel(), "gguf": GGUF_DECODER, "spaces": SPACE_DECODER}[
        decoder
    ]
    made.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    made.add_tokens(
        [
            AddedToken(text, normalized=False)
            for text in ("<think>", "a b", "\u2581x", "<0x41>", "\u4e16")
        ]
    )
    return made


@examples(150)
@given(st.sampled_from(["bytes", "gguf"]), st.lists(st.integers(0, 420), max_size=40))
def test_table_decodes_like_the_tokenizer(kind: str, ids: list[int]) -> None:
    table = byte_table(core(kind))
    assert table is not None
    assert table_decode(table, core(kind), ids) == core(kind).decode(ids, skip_special_tokens=True)


@examples(150)
@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_alike(data: bytes) -> None:
    """Cut and overlong characters, surrogates, bytes that are never valid."""
    tokenizer = tiny_tokenizer()
    ids = list(data)  # its first 256 ids are the bytes, in the order of their signs
    assert Renderer(tokenizer).decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_decoders_that_do_more_than_join_bytes_have_no_table() -> None:
    assert byte_table(core("spaces")) is None


def test_cache_returns_what_was_put_and_stays_bounded() -> None:
    cache = EncodeCache(limit=100)
    for index in range(1000):
        cache.put(f"text {index:03d}", (index,))
        assert cache.get("text 000") == (0,)  # asked for all the time, so it stays
        assert cache.get(f"text {index:03d}") == (index,)
    assert cache.get("text 500") is None
    cache.put("x" * 101, (1,))
    assert cache.get("x" * 101) is None


@examples(100)
@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_", "start|>", "<|im_start|>", "up", "<", " "]),
        max_size=8,
    )
)
def test_repeated_and_hostile_texts_encode_alike(parts: list[str]) -> None:
    tokenizer, text = tiny_tokenizer(), "".join(parts)
    renderer = Renderer(tokenizer)
    for _ in range(2):
        assert list(renderer.encode(text)) == tokenizer.encode(text, add_special_tokens=False)
