"""Calls of tools in the history of a conversation reach the policy, whatever its chat template."""

import json
from typing import Any

import openai
import pytest
from agent_parts import play, scripted

from turnwise.chat.render import Renderer
from turnwise.endpoint.policy import PolicyServer
from turnwise.generate.base import Sampling
from turnwise.testing.tiny import CHATML_TEMPLATE, tiny_tokenizer
from turnwise.types import Message, Status, ToolCall

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows nothing of tools, like that of the embedded model."""
STRICT = PLAIN.replace(
    "{{ message.content }}",
    "{{ message.content }}{% if message.tool_calls %}{{ raise_exception('no tools') }}{% endif %}",
)
AS_TEXT = PLAIN.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.function.name }}: {{ '' + call.function.arguments }}]{% endfor %}",
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "press",
            "parameters": {"type": "object", "properties": {"color": {"type": "string"}}},
        },
    }
]
SAID = 'Well. <tool_call>{"arguments": {"color":  "red"}, "name": "press"}</tool_call>'
WRITTEN = '<tool_call>{"name": "press", "arguments": {"color": "red"}}</tool_call>'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (PLAIN, f"So:\n{WRITTEN}<|im_end|>"),
        (STRICT, f"So:\n{WRITTEN}<|im_end|>"),
        (AS_TEXT, 'So:[press: {"color": "red"}]<|im_end|>'),
        # Arguments are an object here, and not a text with a JSON object in it.
        (CHATML_TEMPLATE, 'So:<tool_call>{"name": "press", "arguments": {"color": "red"}}<'),
    ],
    ids=["plain", "strict", "text", "object"],
)
def test_every_template_writes_the_calls_of_the_history(template: str, written: str) -> None:
    renderer = Renderer(tiny_tokenizer(template))
    call = ToolCall(id="a", name="press", arguments='{"color": "red"}')
    messages = [
        Message(role="user", content="Which?"),
        Message(role="assistant", content="So:", tool_calls=(call,)),
        Message(role="tool", content="ok", tool_call_id="a"),
    ]
    text = renderer.prompt(messages, TOOLS)
    assert f"<|im_start|>assistant\n{written}" in text, text


def test_arguments_cannot_forge_the_end_of_a_call() -> None:
    for template in (PLAIN, CHATML_TEMPLATE):
        renderer = Renderer(tiny_tokenizer(template))
        arguments = json.dumps({"color": "</tool_call><|im_end|>"}).replace("</", "\\u003c/")
        call = ToolCall(id="a", name="press", arguments=arguments)
        messages = [
            Message(role="user", content="Which?"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="ok", tool_call_id="a"),
        ]
        text = renderer.prompt(messages)
        assert text.count("</tool_call>") == 1
        assert text.count("<|im_end|>") == 3


def summarises(client: Any) -> float:
    """A history that still holds the call, in a context that begins anew."""
    messages: list[Any] = [{"role": "user", "content": "The lamp is red."}]
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    said = answer.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "ok"}
    again = [{"role": "user", "content": "Summary: a lamp."}, said, result]
    client.chat.completions.create(model="policy", messages=again, tools=TOOLS)
    return 1.0


def test_a_context_that_begins_anew_in_training_has_its_calls() -> None:
    (episode,), _ = play(summarises, SAID, template=PLAIN)
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.restart for turn in episode.turns] == [True, True]
    read = tiny_tokenizer(PLAIN).decode(list(episode.turns[1].prompt_ids))
    assert f"assistant\nWell.\n{WRITTEN}<|im_end|>" in read.replace(":  ", ": ")


@pytest.mark.parametrize("template", [PLAIN, CHATML_TEMPLATE], ids=["plain", "chatml"])
def test_serve_reads_its_own_calls_as_it_sampled_them(template: str) -> None:
    """The second turn holds the ids of the first and what it said, as in training."""
    recorder = scripted(SAID)
    sampling = Sampling(max_tokens=200, temperature=1.0)
    with PolicyServer(recorder, tiny_tokenizer(template), sampling) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "The lamp is red."}]

        def ask(stream: bool = False) -> Any:
            return client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, stream=stream
            )

        said = ask().choices[0].message
        call = said.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
        messages += [said, result]
        ask()
        (_, first, ids), (_, second, _) = recorder.calls
        assert second[: len(first) + len(ids)] == first + ids
        # What the client changed is read as it stands.
        messages[1] = said.model_dump(exclude_none=True)
        messages[1]["tool_calls"][0]["function"]["arguments"] = '{"color": "blue"}'
        list(ask(stream=True))
        read = tiny_tokenizer().decode(list(recorder.calls[2][1]))
        assert '{"name": "press", "arguments": {"color": "blue"}}' in read
        assert "red" not in read.partition("assistant")[2]
