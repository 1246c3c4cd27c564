"""`turnwise serve`: the policy behind OpenAI's API after training."""

import http.client
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from turnwise.endpoint.policy import PolicyServer
from turnwise.generate.base import Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.models.alternatives import likeliest
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

USER: Any = {"role": "user", "content": "Where to?"}
SAID = "<think> which way?\nnorth </think>\n\nNorth, I think: <b>"


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    tokenizer = tiny_tokenizer()

    def goes_on(session: Session, ids: tuple[int, ...], call: int) -> str:
        return SAID.removeprefix(tokenizer.decode(list(ids)).rpartition("assistant\n")[2])

    generator = ScriptedGenerator(goes_on, tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    with PolicyServer(generator, tokenizer, Sampling(max_tokens=200, temperature=1.0)) as found:
        yield found


def ask(server: PolicyServer, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    return client.chat.completions.create(model="m", messages=[USER], **options)


def test_refusals_speak_of_a_server_and_not_of_training(server: PolicyServer) -> None:
    for options in ({"frequency_penalty": 1.0}, {"extra_body": {"wibble": 1}}):
        with pytest.raises(openai.BadRequestError, match="leave it out") as caught:
            ask(server, **options)
        assert "env.options" not in str(caught.value)
        assert "trained" not in str(caught.value)


def test_streams_have_thoughts_words_and_log_probs_of_whole_answers(server: PolicyServer) -> None:
    whole = ask(server, logprobs=True)
    message = whole.choices[0].message
    assert message.reasoning_content == "which way?\nnorth"
    thoughts, words, tokens, pieces = "", "", [], 0
    for chunk in ask(server, logprobs=True, stream=True):
        for choice in chunk.choices:
            thoughts += getattr(choice.delta, "reasoning_content", None) or ""
            words += choice.delta.content or ""
            tokens += choice.logprobs.content if choice.logprobs else []
            pieces += bool(choice.delta.content)
    assert (thoughts, words) == (message.reasoning_content, message.content)
    assert pieces > 1
    assert [(one.token, one.logprob) for one in tokens] == [
        (one.token, one.logprob) for one in whole.choices[0].logprobs.content
    ]


def test_equal_seeds_give_equal_replies() -> None:
    tokenizer = tiny_tokenizer()
    generator = HFGenerator(tiny_model(), tokenizer, slots=4, max_context=512)
    with PolicyServer(generator, tokenizer, Sampling(max_tokens=24, temperature=1.0)) as server:

        def texts(**options: Any) -> list[str]:
            return [choice.message.content for choice in ask(server, **options).choices]

        first = texts(seed=7, n=2)
        assert texts(seed=7, n=2) == first
        assert len({*first, *texts(seed=8)}) == 3
        assert texts(seed=7) == first[:1]
        streamed = ask(server, seed=7, stream=True)
        words = [choice.delta.content or "" for chunk in streamed for choice in chunk.choices]
        assert "".join(words).strip() == first[0].strip()


@pytest.mark.parametrize("headers", [{"Origin": "https://example.org"}, {"Host": "example.org"}])
def test_pages_of_other_sites_are_refused_without_a_token(
    server: PolicyServer, headers: dict[str, str]
) -> None:
    where = urlsplit(server.url)
    body = json.dumps({"messages": [USER]})
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=600)
        connection.request(method, path, body if method == "POST" else None, headers)
        answer = connection.getresponse()
        assert answer.status == 403
        assert "programs on this machine" in json.loads(answer.read())["error"]["message"]
        connection.close()


def told_tokens(choice: Any) -> list[Any]:
    return choice.logprobs.content if choice.logprobs else []


def test_the_likeliest_tokens_are_told_where_the_network_is_known() -> None:
    tokenizer, model = tiny_tokenizer(), tiny_model()
    generator = HFGenerator(model, tokenizer, slots=4, max_context=512)
    sampling, tells = Sampling(max_tokens=12, temperature=1.0), partial(likeliest, model)
    with PolicyServer(generator, tokenizer, sampling, likeliest=tells) as server:
        for stream in (False, True):
            told = ask(server, logprobs=True, top_logprobs=20, seed=5, stream=stream)
            choices = [one for chunk in told for one in chunk.choices] if stream else told.choices
            tokens = [one for choice in choices for one in told_tokens(choice)]
            shares = [[one.logprob for one in token.top_logprobs] for token in tokens]
            assert shares == [sorted(row, reverse=True) for row in shares]
            assert {len(row) for row in shares} == {20}
            assert all(
                token.logprob <= row[0] + 1e-4 for token, row in zip(tokens, shares, strict=True)
            )
            same = [
                one.logprob - token.logprob
                for token in tokens
                for one in token.top_logprobs
                if one.token == token.token and token.token.isalnum()
            ]
            assert same == pytest.approx([0.0] * len(same), abs=1e-4)
            assert len(same) > 0
        assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
        with pytest.raises(openai.BadRequestError, match="needs logprobs: true"):
            ask(server, top_logprobs=3)
        with pytest.raises(openai.BadRequestError, match=r"in \[0, 20\], got 21"):
            ask(server, logprobs=True, top_logprobs=21)


def test_the_likeliest_tokens_are_refused_where_it_is_not(server: PolicyServer) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs = 3 cannot be honoured"):
        ask(server, logprobs=True, top_logprobs=3)
