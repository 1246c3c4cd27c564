"""What goes over the wire, as real clients read it."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest
from agent_parts import play

from turnwise.endpoint import server
from turnwise.endpoint.episode import AgentEpisode, Said
from turnwise.endpoint.server import Endpoint
from turnwise.serve.http import listen
from turnwise.types import Status, Task

USER: Any = {"role": "user", "content": "Where to?"}


def chat(client: Any, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **options)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    """The endpoint in this process, so that a test can play the rollout's part."""
    found = Endpoint(listen("127.0.0.1", 0, token=None)[0], work_token="a secret")
    yield found
    found.close()


def on(endpoint: Endpoint, job: Callable[[], Any]) -> Any:
    """What the function returns on the endpoint's event loop."""

    async def run() -> Any:
        found = job()
        return await found if asyncio.iscoroutine(found) else found

    future: Future[Any] = asyncio.run_coroutine_threadsafe(run(), endpoint.loop)
    return future.result(600)


def test_a_stream_that_waits_reads_as_one_that_does_not(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE", 0.05)
    url = f"http://127.0.0.1:{endpoint._server._listener.getsockname()[1]}"

    def begin() -> AgentEpisode:
        episode = AgentEpisode(
            Task(id="t", seed=0), trained_roles=None, ignore=frozenset(), lease=600.0
        )
        endpoint.open(episode, queue="q")
        return episode

    episode = on(endpoint, begin)
    client = openai.OpenAI(base_url=f"{url}/e/{episode.token}/v1", api_key="x", max_retries=0)
    with client.chat.completions.stream(model="policy", messages=[USER]) as stream:
        events = iter(stream)
        kept = 0
        while kept < 4:  # the first chunk, and then signs of life
            kept += next(events).type == "chunk"
        on(endpoint, episode.opening)
        on(endpoint, lambda: episode.answer("north", Said()))
        for _ in events:
            pass
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "north")


def test_streamed_replies_and_single_choices_are_paid_by_their_ids() -> None:
    def pays(client: Any) -> None:
        (name,) = {chunk.id for chunk in chat(client, [USER], stream=True)}
        client.reward(0.5, name)
        answer = client.responses.create(model="policy", input="And?")
        client.reward(0.25, answer)
        with client.responses.stream(model="policy", input="And?") as events:
            for _ in events:
                pass
            client.reward(2.0, events.get_final_response())
        several = chat(client, [USER], n=3)
        client.reward(4.0, several)
        client.reward(8.0, f"{several.id}-2")

    (episode,), _ = play(pays)
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.reward for turn in episode.turns] == [0.5, 0.25, 2.0, 4.0, 0.0, 8.0]


NOT_KEPT: list[tuple[dict[str, Any], str]] = [
    ({"conversation": "conv_1"}, "conversation = 'conv_1' names something that is not kept"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt = .* names something that is not kept"),
    ({"previous_response_id": "resp_1"}, "previous_response_id = 'resp_1' names something"),
    ({"background": True}, "background = True cannot be honoured"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text.format"),
]
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"stream": "yes"}, "stream is true or false, got 'yes'"),
    ({"logprobs": 5}, "logprobs is true or false"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls is true or false"),
    ({"temperature": "hot"}, "temperature is a number in"),
    ({"temperature": -1}, "temperature is a number in"),
    ({"seed": "x"}, "seed is a whole number"),
    ({"top_p": True}, "top_p is a number"),
]


def test_what_is_not_kept_and_what_is_malformed_is_refused_by_name() -> None:
    def tries(client: Any) -> float:
        for options, words in NOT_KEPT:
            with pytest.raises(openai.BadRequestError, match=words):
                client.responses.create(model="policy", input="Hi", **options)
        for options, words in MALFORMED:
            with pytest.raises(openai.BadRequestError, match=words):
                chat(client, [USER], extra_body=options)
        neutral = {"background": False, "conversation": None, "prompt": None}
        client.responses.create(model="policy", input="Hi", extra_body=neutral)
        return 1.0

    (episode,), _ = play(tries)
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) == 1


def test_settings_without_effect_are_recorded_by_name() -> None:
    def sets(client: Any) -> float:
        chat(client, [USER])
        chat(client, [USER], seed=3, temperature=0.5, parallel_tool_calls=False)
        form: Any = {"format": {"type": "json_object"}}
        client.responses.create(model="policy", input="Hi", text=form, parallel_tool_calls=True)
        return 1.0

    (episode,), _ = play(sets, options={"ignore": ["text.format"]})
    assert episode.status is Status.COMPLETED, episode.error
    found = [set(str(turn.info.get("overridden", "")).split(", ")) for turn in episode.turns]
    named = [{"seed", "temperature", "parallel_tool_calls"}, {"text.format"}]
    assert [names for names in found if names != {""}] == named


def test_streamed_calls_and_empty_replies_have_their_log_probs() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    said = ['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "<think>hm</think>", "ok"]

    def streams(client: Any) -> float:
        for _ in said:
            counts: list[int] = []
            usage = 0
            options: Any = {"stream_options": {"include_usage": True}}
            for chunk in chat(client, [USER], stream=True, logprobs=True, tools=[tool], **options):
                usage = chunk.usage.completion_tokens if chunk.usage else usage
                found = [choice.logprobs for choice in chunk.choices if choice.logprobs]
                counts += [len(one.content) for one in found]
            assert counts == [usage]
        return 1.0

    (episode,), _ = play(streams, lambda session, call: said[call])
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) == 3
