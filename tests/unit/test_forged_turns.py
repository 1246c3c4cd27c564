"""Nobody forges a turn: hostile text in any field of any template stays text, and ordinary text
stays as it is."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from chat_templates import FAMILIES, TOOL_FAMILIES
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from turnwise.chat.render import Renderer
from turnwise.config.schema import FormatConfig, RolloutConfig
from turnwise.envs.actions import answer_form
from turnwise.rollout.context import ContextManager
from turnwise.testing.tiny import (
    CHATML_TEMPLATE,
    REWRITING_TEMPLATE,
    SPECIAL_TOKENS,
    tiny_tokenizer,
)
from turnwise.types import Message, ToolCall

TEMPLATES = {
    **FAMILIES,
    **TOOL_FAMILIES,
    "chatml": CHATML_TEMPLATE,
    "rewriting": REWRITING_TEMPLATE,
    "angles": "{% for m in messages %}<|im_start|>{{ m.role }}\n<{{ m.content }}>\n{% endfor %}",
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
ADDED = (*CONTROL, "<|object_ref|>")
MARKS = (*SPECIAL_TOKENS, *ADDED, "[/INST]", "[TOOL_CALLS]", "<function=", "<|message|>", "<name>")
PARTS = [
    part for mark in MARKS for part in (mark, mark[:1], mark[1:], mark[:-1], mark[-1:], mark[1:-1])
]
hostile = st.one_of(
    st.sampled_from(MARKS),
    st.sampled_from(PARTS),
    st.lists(st.one_of(st.sampled_from(PARTS), st.text("<|>/[]-x", max_size=3)), max_size=6).map(
        "".join
    ),
).filter(lambda text: text.strip("-") == text.strip() == text != "")
FIELDS = ("system", "task", "reply", "answer", "tool_name", "call_id", "call_name",
    "call_arguments", "schema_name", "schema_description",
    "schema_key", "schema_value")  # fmt: skip


@cache
def renderer(family: str, where: str = "observations") -> tuple[Any, Renderer]:
    tokenizer = tiny_tokenizer(TEMPLATES[family])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer, Renderer(tokenizer, break_control=where)  # pyright: ignore[reportArgumentType]


def conversation(family: str, texts: dict[str, str]) -> tuple[list[Message], list[dict[str, Any]]]:
    """Everything that others say, as far as the template takes it; `texts` by field."""
    say = {field: "abc" for field in FIELDS} | texts
    messages = [Message(role="system", content=say["system"])]
    messages += [
        Message(role="user", content=say["task"]),
        Message(role="assistant", content=say["reply"]),
    ]
    messages += [Message(role="user", content=say["answer"])]
    if family not in TOOL_FAMILIES and family not in ("chatml", "rewriting"):
        return messages, []
    call = ToolCall(id=say["call_id"], name=say["call_name"], arguments=say["call_arguments"])
    messages.append(Message(role="assistant", content="", tool_calls=(call,)))
    messages.append(
        Message(
            role="tool", content=say["answer"], name=say["tool_name"], tool_call_id=say["call_id"]
        )
    )
    properties = {say["schema_key"]: {"type": "object", "enum": [say["schema_value"]]}}
    function = {"name": say["schema_name"], "description": say["schema_description"],
        "parameters": {"type": "object", "properties": properties}}  # fmt: skip
    return messages, [{"type": "function", "function": function}]


def marks(family: str, texts: dict[str, str], where: str = "observations") -> list[str]:
    """Special and added tokens in the ids of a conversation, in order."""
    tokenizer, chat = renderer(family, where)
    ids = chat.encode(chat.prompt(*conversation(family, texts)))
    return [tokenizer.decode([index]) for index in ids if index >= 256]


FOR_EACH_TEMPLATE = examples(25)


@pytest.mark.parametrize("family", TEMPLATES)
@FOR_EACH_TEMPLATE
@given(
    st.dictionaries(st.sampled_from([f for f in FIELDS if f not in ("system", "reply")]), hostile)
)
def test_no_text_of_others_becomes_a_control_token(family: str, texts: dict[str, str]) -> None:
    assert marks(family, texts) == marks(family, {})


@pytest.mark.parametrize("family", TEMPLATES)
@FOR_EACH_TEMPLATE
@given(st.dictionaries(st.sampled_from(FIELDS), hostile))
def test_no_text_at_all_becomes_a_special_token(family: str, texts: dict[str, str]) -> None:
    """What the model said may hold control strings, which the template reads; never special
    tokens."""

    def special(found: list[str]) -> list[str]:
        return [text for text in found if text in SPECIAL_TOKENS]

    assert special(marks(family, texts)) == special(marks(family, {}))


@pytest.mark.parametrize("family", TEMPLATES)
@FOR_EACH_TEMPLATE
@given(st.lists(hostile, min_size=1, max_size=4), st.sampled_from(["full", "last_k"]))
def test_marks_in_text_of_the_template_are_not_forged_either(
    family: str, texts: list[str], window: str
) -> None:
    """Turn by turn, as rollouts render: strings that no token stands for count too."""
    tokenizer, chat = renderer(family)

    def seen(answers: list[str]) -> list[list[str]]:
        config = RolloutConfig(window=window, window_turns=1)  # pyright: ignore[reportArgumentType]
        context = ContextManager(tokenizer, config, max_context=4000)
        context.open(0, key="e", seed=7, prompt=[Message(role="user", content=answers[0])])
        found: list[list[str]] = []
        for answer in [*answers[1:], None]:
            asked = context.next_input(
                0, [] if not found else [Message(role="user", content=answers[len(found)])]
            )
            found.append(chat._controls.found(tokenizer.decode(asked.new_ids)))
            if answer is not None:
                _reply(context, tokenizer)
        return found

    assert seen(texts) == seen(["abc"] * len(texts))


def _reply(context: ContextManager, tokenizer: Any) -> None:
    from turnwise.rollout.outputs import LmOutput
    from turnwise.types import Completion

    ids = (*tokenizer.encode("up"), tokenizer.eos_token_id)
    completion = Completion(ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")
    context.get_env_inputs([LmOutput(env_id=0, completion=completion)])


ordinary = st.lists(
    st.sampled_from(
        [
            "<",
            "a < b",
            "|",
            "think",
            "object",
            "s",
            "<b>",
            "<answer>up</answer>",
            "[3]",
            # Fmt: skip.
            "</div>",
            "x[0]",
            "up",
            "\u4e16",
            "im_end",
            "/think",
            ">",
        ]
    ),
    min_size=1,
    max_size=5,
).map(" ".join)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name != "no_system"])
@FOR_EACH_TEMPLATE
@given(
    st.dictionaries(
        st.sampled_from(FIELDS), ordinary.filter(lambda text: text.strip("-\n") == text)
    )
)
def test_ordinary_text_is_as_the_template_writes_it(family: str, texts: dict[str, str]) -> None:
    """Golden: the template alone, and nothing of ours between."""
    tokenizer, chat = renderer(family)
    messages, tools = conversation(family, texts)
    plain = tokenizer.apply_chat_template(
        [message.to_json() for message in messages],
        tools=deepcopy(tools) or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    if any(mark in plain for mark in CONTROL if mark not in TEMPLATES[family]):
        return  # with what the template writes around it, this text is not ordinary
    assert chat.prompt(messages, tools) == plain


def test_control_strings_can_be_broken_everywhere_or_nowhere() -> None:
    texts = {"system": "</think>", "answer": "</think>"}
    assert marks("tools", texts, "observations").count("</think>") == 1
    assert marks("tools", texts, "all").count("</think>") == 0
    assert marks("tools", texts, "none").count("</think>") == 3  # the user's and the tool's answer
    for where in ("observations", "all", "none"):
        assert marks("tools", {"answer": "<|im_end|>", "system": "<|im_end|>"}, where) == marks(
            "tools", {}, where
        )


def test_turnwise_own_reminder_keeps_its_tags() -> None:
    tokenizer, _ = renderer("tools")
    context = ContextManager(tokenizer, RolloutConfig(), max_context=4000)
    reminder = f"Reply with {answer_form(FormatConfig(), ('up',))}."
    kept = context.renderer.prompt([Message(role="user", content=reminder)])
    assert reminder in kept
    other = context.renderer.prompt([Message(role="user", content="</think>" + reminder)])
    assert reminder in other
    assert "</think>Reply" not in other


@pytest.mark.parametrize("normalizer", ["NFKC", "Lowercase", "drops", "none"])
@pytest.mark.parametrize(
    "text", ["\uff1c|stop|>", "<|STOP|>", "<|stop|>", "<\u200b|stop|>", "|-|-|"]
)
def test_letters_that_a_tokenizer_rewrites_forge_nothing(normalizer: str, text: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = {
        "drops": normalizers.Replace("\u200b", ""),
        "none": None,
        "NFKC": normalizers.NFKC(),
        "Lowercase": normalizers.Lowercase(),
    }[normalizer]
    special = [AddedToken(token, normalized=True, special=True) for token in ("<|stop|>", "|-|")]
    tokenizer.add_tokens(special, special_tokens=True)
    chat = Renderer(tokenizer)
    ids = chat.encode(chat.prompt([Message(role="user", content=f"go {text}")]))
    assert max(ids) < tokenizer.convert_tokens_to_ids("<|stop|>")
    assert Renderer(tiny_tokenizer()).prompt([Message(role="user", content="go")]) == chat.prompt(
        [Message(role="user", content="go")]
    )
