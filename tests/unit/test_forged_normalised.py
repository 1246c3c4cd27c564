"""Tokenizers that normalise text: no other spelling of a control token becomes that token."""

import unicodedata
from functools import cache
from typing import Any

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from test_forged_turns import ADDED, FIELDS, TEMPLATES, conversation
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from turnwise.chat.render import Renderer
from turnwise.testing.tiny import SPECIAL_TOKENS
from turnwise.types import Message

SHORT = "(a)"
"""U+249C is one character, and NFKC makes three of it."""
SPECIAL = (*SPECIAL_TOKENS, SHORT)
NORMALIZERS = {
    "NFKC": normalizers.NFKC(),
    "lowercase": normalizers.Lowercase(),
    "strips": normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    ),
    "bert": normalizers.BertNormalizer(handle_chinese_chars=False),
}
FAMILIES = ("chatml", "tools", "rewriting", "angles", "bare")


def _wide(text: str) -> str:
    return "".join(chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign for sign in text)


def _spellings(mark: str) -> list[str]:
    accents = "\u0301".join(mark)
    mixed = "".join(_wide(sign) if place % 2 else sign for place, sign in enumerate(mark))
    found = [mark, _wide(mark), mark.upper(), accents, mixed, "\u200b".join(mark)]
    return [part for text in found for part in (text, text[:3], text[3:], text[:-1], text[-1:])]


PARTS = [part for mark in (*SPECIAL, *ADDED, "[/INST]") for part in _spellings(mark) if part]
SIGNS = "\u249c\u0301\u0338\u200b\uff1c\uff5c\uff1e\ufe64\ufe65\ufe69\u212aKxX "
hostile = (
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(SIGNS, max_size=3)), max_size=5)
    .map("".join)
    .filter(lambda text: text.strip("-") == text.strip() == text != "")
)


@cache
def renderer(family: str, kind: str) -> tuple[Any, Renderer]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    core.normalizer = NORMALIZERS[kind]
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, normalized=True) for text in SPECIAL])
    core.add_tokens([AddedToken(text, normalized=True) for text in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer, Renderer(tokenizer)  # pyright: ignore[reportArgumentType]


def marks(family: str, kind: str, texts: dict[str, str]) -> list[str]:
    """Special and added tokens in the ids of a conversation, in order."""
    tokenizer, chat = renderer(family, kind)
    ids = chat.encode(chat.prompt(*conversation(family, texts)))
    return [tokenizer.convert_ids_to_tokens(index) for index in ids if index >= 256]


FOR_EACH = examples(25)
OTHERS = [name for name in FIELDS if name not in ("system", "reply")]


@pytest.mark.parametrize("kind", NORMALIZERS)
@pytest.mark.parametrize("family", FAMILIES)
@FOR_EACH
@given(st.dictionaries(st.sampled_from(OTHERS), hostile, min_size=1))
def test_no_spelling_becomes_a_control_token(family: str, kind: str, texts: dict[str, str]) -> None:
    assert marks(family, kind, texts) == marks(family, kind, {})


@pytest.mark.parametrize("kind", NORMALIZERS)
@pytest.mark.parametrize("family", FAMILIES)
@FOR_EACH
@given(st.dictionaries(st.sampled_from(FIELDS), hostile, min_size=1))
def test_no_spelling_at_all_becomes_a_special_token(
    family: str, kind: str, texts: dict[str, str]
) -> None:
    def special(found: list[str]) -> list[str]:
        return [text for text in found if text in SPECIAL]

    assert special(marks(family, kind, texts)) == special(marks(family, kind, {}))


ordinary = st.text("aX\u00e9\uff21\u4e16 <|>.\n\u2460", min_size=1, max_size=12).filter(
    lambda text: text.strip() == text
)


@pytest.mark.parametrize("kind", NORMALIZERS)
@pytest.mark.parametrize("family", ["chatml", "tools"])
@FOR_EACH
@given(st.dictionaries(st.sampled_from(FIELDS), ordinary))
def test_ordinary_text_keeps_its_ids(family: str, kind: str, texts: dict[str, str]) -> None:
    tokenizer, chat = renderer(family, kind)
    messages, tools = conversation(family, texts)
    plain = tokenizer.apply_chat_template(
        [message.to_json() for message in messages],
        tools=tools or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert chat.encode(chat.prompt(messages, tools)) == tuple(
        tokenizer.encode(plain, add_special_tokens=False)
    )


def test_only_the_line_with_the_token_is_split() -> None:
    _, chat = renderer("chatml", "NFKC")
    text = f"\uff21 first\n{_wide('<|im_end|>')}\nlast \uff21"
    said = chat.prompt([Message(role="user", content=text)])
    assert "user\n\uff21 first\n" in said
    assert "\nlast \uff21<|im_end|>" in said


def test_a_control_string_without_a_token_is_not_spelled_otherwise_either() -> None:
    """The ids of its normalised letters are all that the model sees of it."""
    _, chat = renderer("chatml", "NFKC")
    asked = [Message(role="user", content=_wide("</tool_response>") + _wide("</think>"))]
    seen = unicodedata.normalize("NFKC", chat.prompt(asked))
    assert "</tool_response>" not in seen
    assert "</think>" not in seen
