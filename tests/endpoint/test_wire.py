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
