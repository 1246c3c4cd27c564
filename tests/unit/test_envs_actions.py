"""Reading replies: any text is answered, quickly, and what is legal is found."""

import time
from collections.abc import Sequence

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import FormatConfig
from turnwise.envs.actions import match_action, split_reply, write_reply

LEGAL = ("up", "down", "turn left")
FORMAT = FormatConfig()
PLAIN = FormatConfig(think=False)


def parsed(
    text: str, config: FormatConfig, legal: Sequence[str] = ()
) -> tuple[tuple[str | None, ...], str | None]:
    """The action of each piece of a reply, None where it is illegal, and the thoughts."""
    pieces, think = split_reply(text, config, legal)
    return tuple(match_action(piece, legal) for piece in pieces), think


@pytest.mark.parametrize(
    ("text", "config", "actions", "think"),
    [
        ("<think>a</think><answer>up</answer>", FORMAT, ("up",), "a"),
        ("a</think> so <answer>UP || Turn  Left</answer> done", FORMAT, ("up", "turn left"), "a"),
        ("<answer>up</answer>", FORMAT, (), None),
        ("<answer>up</answer>", PLAIN, ("up",), None),
        (
            "<think><answer>down</answer></think><answer>up</answer>",
            PLAIN,
            ("up",),
            "<answer>down</answer>",
        ),
        ("<think>a</think><answer>up || fly || down</answer>", FORMAT, ("up", None, "down"), "a"),
        ("<think>a</think><answer>fly || up</answer>", FORMAT, (None, "up"), "a"),
        ("<think>a</think><answer>up || || down</answer>", FORMAT, ("up", None, "down"), "a"),
        ("<think>a</think><answer>up", FORMAT, (), "a"),
        ("<answer>up</answer><think>late</think>", FORMAT, (), "late"),
        ("<think>a</think><answer>" + "up||" * 9 + "</answer>", FORMAT, ("up",) * 5, "a"),
        (
            "<answer>up,down</answer>",
            FormatConfig(think=False, action_sep=","),
            ("up", "down"),
            None,
        ),
        (
            "<answer>up || down</answer>",
            FormatConfig(think=False, max_actions_per_turn=1),
            ("up",),
            None,
        ),
        (" Up || down\n", FormatConfig(style="raw"), ("up", "down"), None),
        ("<answer>up</answer>", FormatConfig(style="raw"), (None,), None),
        ("<answer>\x00up</answer>", PLAIN, (None,), None),
        ("", FORMAT, (), None),
    ],
)
def test_parse_reply(
    text: str, config: FormatConfig, actions: tuple[str | None, ...], think: str | None
) -> None:
    assert parsed(text, config, LEGAL) == (actions, think)


def test_free_text_is_split_only_where_several_actions_fit() -> None:
    text = "<answer>|x||y|</answer>"
    one = FormatConfig(think=False, max_actions_per_turn=1)
    assert parsed(text, one) == (("|x||y|",), None)
    assert parsed(text, PLAIN) == (("|x", "y|"), None)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "||", "up", "down", "fly", " ", "\x00", "<"]
)


@given(st.lists(PIECES, max_size=30).map("".join))
@examples(200)
def test_whatever_is_parsed_stands_in_the_text(text: str) -> None:
    for config in (FORMAT, PLAIN, FormatConfig(style="raw")):
        actions, think = parsed(text, config, LEGAL)
        assert set(actions) <= {*LEGAL, None}
        assert all(piece in text for piece in split_reply(text, config)[0])
        assert think is None or think in text


@given(
    st.lists(st.sampled_from(LEGAL), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["answer", "raw"]),
    st.text(),
)
@examples(100)
def test_written_replies_are_read_back(
    actions: list[str], think: bool, style: str, thoughts: str
) -> None:
    config = FormatConfig.model_validate({"style": style, "think": think})
    thoughts = thoughts.replace("<", "(")
    reply = write_reply(actions, config, think=thoughts)
    assert parsed(reply, config, LEGAL)[0] == tuple(actions)


@pytest.mark.parametrize(
    "unit",
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "||",
        "<",
        "a",
        "\x00",
        "<think><answer>",
        " ",
    ],
)
def test_ten_megabytes_are_parsed_quickly(unit: str) -> None:
    hostile = unit * (10_000_000 // len(unit))
    for text in (hostile, f"<think></think><answer>{hostile}</answer>"):
        start = time.process_time()
        parsed(text, FORMAT, LEGAL)
        parsed(text, FORMAT)
        assert time.process_time() - start < 0.5


def test_match_action_ignores_case_and_spacing_only() -> None:
    assert match_action(" TURN\tleft ", LEGAL) == "turn left"
    assert match_action("turnleft", LEGAL) is None
    assert match_action("u" * 30_000, ()) is None
