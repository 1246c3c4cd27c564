"""No client's way of sending a reply back makes the policy read other tokens than it sampled."""

import json
from random import Random
from typing import Any

import pytest
from agent_parts import play

from turnwise.data.samples import contexts
from turnwise.types import Status, Task

TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
WORDS = (
    *(
        "north",
        "caf\u00e9",
        "\u4f60\u597d",
        "\U0001f600",
        "\u200b",
        "a\u0301",
        "\u00a0",
        "\t",
        "  ",
    ),
    *(
        "\n\n",
        '"',
        "\\",
        "{}",
        "</think",
        "<tool_call",
        "<|im_end|",
        "```json",
        "null",
        "\u202e",
        "\x0b",
    ),
)
VALUES = (
    1,
    1.0,
    2.5,
    "x",
    "caf\u00e9",
    "\U0001f600",
    None,
    True,
    [1, {"a": " "}],
    {"b": [], "a": ""},
)


def reply(rng: Random) -> str:
    """Something that a model might say, in any form."""
    text = "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 6)))
    if rng.random() < 0.3:
        text = f"<think>{''.join(rng.choice(WORDS[:9]) for _ in range(3))}</think>{text}"
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        names = rng.sample(("at", "n", "caf\u00e9"), rng.randint(0, 3))
        arguments: Any = {name: rng.choice(VALUES) for name in names}
        form = rng.choice(((", ", ": "), (",", ":"), (" ,  ", " : ")))
        body = json.dumps(
            {"name": "look", "arguments": arguments},
            separators=form,
            ensure_ascii=rng.random() < 0.5,
        )
        if rng.random() < 0.1:
            body = body[:-1]  # malformed: it stays text
        text += rng.choice(("", " ", "\n\n")) + f"<tool_call>\n{body}\n</tool_call>"
    return text


def sent_back(message: Any, rng: Random) -> dict[str, Any]:
    """The reply as one client or another sends it back."""
    content: Any = message.content
    if rng.random() < 0.5 and content is not None:
        content = content.strip()
    if rng.random() < 0.3 and content:
        content = [{"type": "text", "text": content}]
    elif not content:
        content = rng.choice((None, "", []))
    echo: dict[str, Any] = {"role": "assistant", "content": content}
    thoughts = getattr(message, "reasoning_content", None)
    if thoughts and rng.random() < 0.3 and isinstance(content, str):
        echo["content"] = f"<think>\n{thoughts}\n</think>\n\n{content}"
    calls: list[Any] = []
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        if rng.random() < 0.7:
            arguments = json.dumps(
                json.loads(arguments),
                ensure_ascii=rng.random() < 0.5,
                sort_keys=rng.random() < 0.5,
                indent=rng.choice((None, 2)),
            )
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    if calls:
        echo["tool_calls"] = calls
    return echo


def talk(task: Task, client: Any) -> float:
    rng = Random(task.seed)
    messages: list[Any] = [{"role": "user", "content": rng.choice(WORDS)}]
    for _ in range(rng.randint(2, 5)):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        echo = sent_back(message, rng)
        messages.append(echo)
        for call in echo.get("tool_calls", ()):
            result = {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(WORDS)}
            messages.append(result)
        if not echo.get("tool_calls") or rng.random() < 0.2:
            messages.append({"role": "user", "content": rng.choice(WORDS)})
    return 1.0


def check(conversations: int, *, template: str = "chatml") -> None:
    rng = Random(0)
    episodes, recorder = play(
        talk,
        lambda session, call: reply(rng) or "x",
        groups=conversations,
        template=template,
        step_timeout=600.0,
        reset_timeout=600.0,
        options={"slots": 8},
        max_response_tokens=2000,
    )
    assert len(recorder.calls) > 2 * conversations
    for episode in episodes:
        assert episode.status is Status.COMPLETED, episode.error
        causes = [turn.info.get("context_cause") for turn in episode.turns]
        assert len(contexts(episode.turns)) == 1, (causes, [turn.text for turn in episode.turns])


def test_replies_in_any_form_are_continued_by_their_tokens() -> None:
    check(60)


@pytest.mark.slow
def test_two_thousand_conversations_drift_nowhere() -> None:
    check(2000)
