"""Reading replies: any text is answered, quickly, and what is legal is found."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config.schema import FormatConfig
from turnwise.envs.actions import match_action, parse_reply, split_reply, write_reply

LEGAL = ("up", "down", "turn left")
FORMAT = FormatConfig()
PLAIN = FormatConfig(think=False)


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
        ("<think>a</think><answer>up || fly || down</answer>", FORMAT, ("up",), "a"),
        ("<think>a</think><answer>fly || up</answer>", FORMAT, (), "a"),
        ("<think>a</think><answer>up || || down</answer>", FORMAT, ("up",), "a"),
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
        ("<answer>up</answer>", FormatConfig(style="raw"), (), None),
        ("<answer>\x00up</answer>", PLAIN, (), None),
        ("", FORMAT, (), None),
    ],
)
def test_parse_reply(
    text: str, config: FormatConfig, actions: tuple[str, ...], think: str | None
) -> None:
    reply = parse_reply(text, config, LEGAL)
    assert (reply.actions, reply.valid, reply.think) == (actions, bool(actions), think)


def test_free_text_is_split_only_where_several_actions_fit() -> None:
    text = "<answer>|x||y|</answer>"
    one = FormatConfig(think=False, max_actions_per_turn=1)
    assert parse_reply(text, one).actions == ("|x||y|",)
    assert parse_reply(text, PLAIN).actions == ("|x", "y|")


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "||", "up", "down", "fly", " ", "\x00", "<"]
)


@given(st.lists(PIECES, max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_whatever_is_parsed_stands_in_the_text(text: str) -> None:
    for config in (FORMAT, PLAIN, FormatConfig(style="raw")):
        reply = parse_reply(text, config, LEGAL)
        assert set(reply.actions) <= set(LEGAL)
        assert reply.valid == bool(reply.actions)
        assert all(piece in text for piece in split_reply(text, config)[0])
        assert reply.think is None or reply.think in text


@given(
    st.lists(st.sampled_from(LEGAL), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["answer", "raw"]),
    st.text(),
)
@settings(max_examples=100, deadline=None)
def test_written_replies_are_read_back(
    actions: list[str], think: bool, style: str, thoughts: str
) -> None:
    config = FormatConfig.model_validate({"style": style, "think": think})
    thoughts = thoughts.replace("<", "(")
    assert parse_reply(
        write_reply(actions, config, think=thoughts), config, LEGAL
    ).actions == tuple(actions)


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
        parse_reply(text, FORMAT, LEGAL)
        parse_reply(text, FORMAT)
        assert time.process_time() - start < 0.5


def test_match_action_ignores_case_and_spacing_only() -> None:
    assert match_action(" TURN\tleft ", LEGAL) == "turn left"
    assert match_action("turnleft", LEGAL) is None
    assert match_action("u" * 30_000, ()) is None
