"""A client for OpenAI-compatible chat endpoints, for evaluation: messages in, a message out.

Such a server speaks messages and not tokens, so it cannot implement Generator: what it returns can
be scored, never trained on. Only the standard library is used.
"""

import asyncio
import http.client
import json
import random
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling
from turnwise.procs.answers import LongAnswerError, read_body
from turnwise.types import Json, Message

MAX_ANSWER = 16 << 20
"""Maximum bytes of an answer."""

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

_UNTOLD = frozenset({400, 403, 422})
"""Answers of servers that do not tell log-probs."""


class RefusedError(GeneratorError):
    """The server refused a request, and would refuse it again."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class SaidToken:
    """A token of a reply, as a server tells it."""

    text: str
    logprob: float
    others: tuple[tuple[str, float], ...] = ()
    """(text, log-prob) of the likeliest tokens in its place, where the server tells them."""


class ChatClient:
    """Asks a model behind an OpenAI-compatible endpoint.

    Args:
        base_url: up to and without /chat/completions, such as http://localhost:8000/v1.
        model: the name that the server knows.
        api_key: sent as a bearer token where given.
        timeout: seconds for one attempt.
        retries: further attempts after a lost connection, a timeout, 429 or 5xx. A connection that
            is refused before the server has ever answered is not tried again.
        backoff: seconds before the first retry; doubled for each further one, unless the server
            names a time.

    Example:
        >>> client = ChatClient("http://localhost:8000/v1", model="qwen")
        >>> body = client.body([Message(role="user", content="hi")],
        ...     Sampling(max_tokens=8, temperature=0.5))
        >>> body["messages"], body["max_tokens"], body["temperature"]
        ([{'role': 'user', 'content': 'hi'}], 8, 0.5)
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        api_key: str | None = None,
        timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 1.0,
    ) -> None:
        url = urllib.parse.urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url must be an http or https address, got {base_url!r}")
        self._url = url
        self._model = model
        self._api_key = api_key
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._telling: list[dict[str, Json]] = []
        self._answered = False

    def body(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> dict[str, Json]:
        """The request as JSON.

        Raises:
            GeneratorError: a setting that the protocol has no field for.
        """
        if sampling.top_k or sampling.stop_ids:
            raise GeneratorError(
                f"a chat endpoint takes neither top_k nor stop_ids, got top_k={sampling.top_k} and "
                f"stop_ids={sampling.stop_ids}; use top_p and stop strings"
            )
        body: dict[str, Json] = {
            "model": self._model,
            "messages": [message.to_json() for message in messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        return body

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
    ) -> Message:
        """The model's reply.

        Raises:
            ContextOverflowError: the server says that the conversation is too long.
            GeneratorError: the server refused, failed for good, or answered something else than a
                chat completion.
        """
        return self._message(await self._ask(self.body(messages, sampling, tools)))

    async def chat_tokens(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        tools: Sequence[Mapping[str, Json]] = (),
        *,
        most: int = 5,
    ) -> tuple[Message, tuple[SaidToken, ...]]:
        """The model's reply, and its tokens with the `most` likeliest in the place of each, as far
        as the server tells them. What it refuses to tell is not asked for again.

        Raises:
            ContextOverflowError, GeneratorError: as `chat` does.
        """
        body = self.body(messages, sampling, tools)
        ways = self._telling or [{"logprobs": True, "top_logprobs": most}, {"logprobs": True}, {}]
        for place, way in enumerate(ways):
            try:
                text = await self._ask({**body, **way})
            except RefusedError as error:
                if error.status not in _UNTOLD or place == len(ways) - 1:
                    raise
            else:
                self._telling = ways[place:]
                return self._message(text), _tokens(text)
        raise AssertionError("the last way was tried")

    async def _ask(self, asked: Mapping[str, Json]) -> str:
        """The server's answer."""
        body = json.dumps(asked).encode()
        problem = ""
        for attempt in range(self._retries + 1):
            try:
                status, headers, text = await asyncio.to_thread(self._post, body)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ConnectionRefusedError) and not self._answered:
                    raise GeneratorError(
                        f"nothing listens at {self._where()} (connection refused); start the "
                        "server, or correct the address"
                    ) from error
                problem, wait = repr(error), None
            else:
                self._answered = True
                if status == 200:
                    return text
                problem, wait = f"status {status}: {text[:300]}", _retry_after(headers)
                if status not in _RETRIED:
                    words = f"{self._where()} refused the request with {problem}"
                    if _too_long(text):
                        raise ContextOverflowError(words)
                    raise RefusedError(words, status=status)
            if attempt < self._retries:
                pause = self._backoff * 2**attempt * random.uniform(0.75, 1.25)
                await asyncio.sleep(pause if wait is None else wait)
        raise GeneratorError(
            f"{self._where()} did not answer in {self._retries + 1} attempts; the last gave "
            f"{problem}"
        )

    def _where(self) -> str:
        return f"{self._url.scheme}://{self._url.netloc}{self._url.path}"

    def _post(self, body: bytes) -> tuple[int, Mapping[str, str], str]:
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(cast(str, self._url.hostname), self._url.port, timeout=self._timeout)
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            connection.request(
                "POST", f"{self._url.path.rstrip('/')}/chat/completions", body=body, headers=headers
            )
            response = connection.getresponse()
            deadline = time.monotonic() + self._timeout
            data = read_body(response, limit=MAX_ANSWER, deadline=deadline)
            return (
                response.status,
                dict(response.getheaders()),
                data.decode("utf-8", errors="replace"),
            )
        except LongAnswerError as error:
            raise GeneratorError(f"{self._where()} answered with {error}") from None
        finally:
            connection.close()

    def _message(self, text: str) -> Message:
        try:
            told = json.loads(text)["choices"][0]["message"]
            message = Message.from_json({**told, "role": "assistant"})
            for said in (message.content, *(call.arguments for call in message.tool_calls)):
                if not isinstance(cast(object, said), str):
                    raise TypeError(f"a text is needed, got {type(said).__name__}")
            return message
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise GeneratorError(
                f"{self._where()} answered no chat completion: {text[:300]}"
            ) from error


def _tokens(text: str) -> tuple[SaidToken, ...]:
    """The tokens of a chat completion. Empty where it tells none, or tells them in another form.

    Example:
        >>> _tokens('{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}]}')
        (SaidToken(text='a', logprob=-0.5, others=()),)
        >>> _tokens('{"choices": [{"logprobs": null}]}')
        ()
    """
    try:
        told = json.loads(text)["choices"][0]["logprobs"]["content"]
        return tuple(
            SaidToken(*_said(one), tuple(_said(other) for other in one.get("top_logprobs") or ()))
            for one in told
        )
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return ()


def _said(one: Any) -> tuple[str, float]:
    return str(one["token"]), float(one["logprob"])


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, None where it names none or gives a date."""
    value = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    try:
        return min(max(float(value), 0.0), 60.0)
    except ValueError:
        return None


def _too_long(text: str) -> bool:
    lowered = text.lower()
    return "context_length_exceeded" in lowered or "maximum context length" in lowered
