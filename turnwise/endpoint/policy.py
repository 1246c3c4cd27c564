"""A trained policy behind the endpoint, for use after training: every request is answered on its
own."""

import asyncio
import hmac
import itertools
import math
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turnwise.chat.render import Renderer, Tokenizer, tools_key
from turnwise.endpoint.asks import Ask, AskError, Rules, read_chat, read_responses
from turnwise.endpoint.history import Key, message_key
from turnwise.endpoint.replies import (
    Reply,
    as_event,
    chat_events,
    chat_json,
    delta_chunk,
    first_chunk,
    read_reply,
    responses_events,
    responses_json,
)
from turnwise.endpoint.server import no_such_page, read_object, refusal
from turnwise.generate.base import Generator, Sampling, Session
from turnwise.seeding import derive_seed
from turnwise.serve.http import HttpServer, ServeError, listen, refuse_pages
from turnwise.types import Completion, Message

MAX_CONNECTIONS = 1024
PIECE = 8
"""Tokens that are sampled between two pieces of a stream."""
MAX_SAID = 10_000
"""Replies with calls of tools whose texts are remembered."""
HONOURED = frozenset({"temperature", "top_p", "top_k"})
RULES = Rules(honoured=HONOURED | {"seed"}, training=False)
TELLING = RULES.honoured | {"top_logprobs"}
LEAST = -9999.0
"""The log-prob of a token that is never sampled, as OpenAI writes it."""


class Likeliest(Protocol):
    """For every token of `said`, the likeliest in its place with their probabilities."""

    def __call__(
        self, before: Sequence[int], said: Sequence[int], *, temperature: float, most: int
    ) -> list[list[tuple[int, float]]]: ...


class PolicyServer:
    """Serves chat completions and responses of one policy. Use it as a context manager.

    Args:
        sampling: how replies are drawn where a request does not say.
        likeliest: tells `top_logprobs`, which are refused without it.
        token: the API key that requests need. None: all programs on this machine may ask.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        likeliest: Likeliest | None = None,
    ) -> None:
        self._generator, self._sampling, self._model = generator, sampling, model
        self._tells = likeliest
        self._rules = RULES if likeliest is None else replace(RULES, honoured=TELLING)
        self._renderer = Renderer(tokenizer)
        self._token = token
        self._count = itertools.count()
        self._name = secrets.token_hex(4)
        self._said: dict[str, tuple[Key, str]] = {}
        """By the id of its first call: a reply, and its text as it was sampled."""
        # The generator has its own event loop, so that decoding does not delay HTTP requests.
        self._engine = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._engine.run_forever, name="turnwise-policy", daemon=True
        )
        listener, self.url = listen(host, port, token=token)
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
            ],
            exception_handlers={404: no_such_page, 405: no_such_page},
        )
        self._server = HttpServer(
            app, listener=listener, max_connections=MAX_CONNECTIONS, closing=self._closing
        )

    def __enter__(self) -> "PolicyServer":
        self._thread.start()
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()
        self._engine.call_soon_threadsafe(self._engine.stop)
        self._thread.join()

    def wait(self, seconds: float) -> bool:
        """True once the server has stopped; waits for at most so long."""
        return self._server.wait(seconds)

    async def _closing(self) -> None:
        """No request is open any more."""

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"model": self._model})

    async def _models(self, request: Request) -> Response:
        try:
            self._authorize(request)
        except (AskError, ServeError) as error:
            return refusal(error)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "turnwise"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _responses(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = bytearray()
        try:
            self._authorize(request)
            await self._server.read(request, body)
            asked = read_object(body)
            ask = read_chat(asked, self._rules) if chat else read_responses(asked, RULES)
            ask = replace(ask, model=self._model)
            ids = self._prompt(ask)
            room = self._generator.max_context - len(ids)
            if room < 1:
                raise AskError(
                    f"the conversation has {len(ids)} tokens, and the context of the policy "
                    f"{self._generator.max_context}",
                    code="context_length_exceeded",
                    param="messages",
                )
            if ask.stream:
                return StreamingResponse(
                    self._stream(ask, ids, room),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                )
            jobs = [self._reply(ask, ids, room, choice) for choice in range(ask.n)]
            replies = await asyncio.gather(*jobs)
            whole = chat_json(ask, replies) if chat else responses_json(ask, replies[0])
            return JSONResponse(whole)
        except Exception as error:
            return refusal(error)
        finally:
            self._server.held -= len(body)

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        messages = [self._as_said(message) for message in ask.messages]
        rendered = self._renderer.render(messages, ask.tools, key=tools_key(ask.tools))
        return self._renderer.encode(rendered.text)

    def _as_said(self, message: Message) -> Message:
        """A reply with calls as the policy wrote it, where the client sends back what it got. So
        the policy reads what it read in training, and not its template's form of it."""
        if not message.tool_calls:
            return message
        key, text = self._said.get(message.tool_calls[0].id, (None, ""))
        return Message(role="assistant", content=text) if key == message_key(message) else message

    def _drawn(self, ask: Ask, room: int) -> Sampling:
        """How the reply is drawn: as the request says, else as the server."""
        default = self._sampling
        limit = min(ask.max_tokens or default.max_tokens, room)
        sampling = replace(default, max_tokens=limit, stop=(*default.stop, *ask.stop))
        return replace(sampling, **{key: ask.settings[key] for key in HONOURED & {*ask.settings}})

    async def _reply(self, ask: Ask, ids: tuple[int, ...], room: int, choice: int) -> Reply:
        session = self._session(ask, choice)
        try:
            sampling = self._drawn(ask, room)
            completion = await self._run(self._generator.generate(session, ids, sampling))
            reply = self._read(ask, len(ids), completion)
            most = ask.settings.get("top_logprobs")
            if self._tells is None or not most or not completion.ids:
                return reply
            told = self._likeliest(self._tells, ids, completion.ids, sampling.temperature, most)
            return replace(reply, likeliest=await self._run(told))
        finally:
            await self._run(self._generator.release(session))

    async def _stream(self, ask: Ask, ids: tuple[int, ...], room: int) -> AsyncIterator[bytes]:
        """Chat completions come while they are sampled; what may be a call of a tool, answers of
        the responses API, and replies with the likeliest tokens come whole."""
        named = ask.api == "responses"
        name = f"chatcmpl-{secrets.token_hex(6)}"
        if named or ask.tools or ask.n > 1 or ask.settings.get("top_logprobs"):
            if not named:
                yield as_event(first_chunk(ask, name))
            jobs = [self._reply(ask, ids, room, choice) for choice in range(ask.n)]
            replies = await asyncio.gather(*jobs)
            if named:
                for number, event in enumerate(responses_events(ask, replies[0])):
                    yield as_event({**event, "sequence_number": number}, named=True)
                return
            for event in chat_events(ask, replies):
                yield as_event({**event, "id": name})
            yield b"data: [DONE]\n\n"
            return
        async for event in self._stream_words(ask, ids, room, name):
            yield event

    async def _stream_words(
        self, ask: Ask, ids: tuple[int, ...], room: int, name: str
    ) -> AsyncIterator[bytes]:
        """One reply as it is sampled, thoughts and words apart."""
        session = self._session(ask)
        thinks = self._renderer.decode(ids[-16:]).rstrip().endswith("<think>")
        try:
            yield as_event(first_chunk(ask, name))
            said: list[int] = []
            sent = {"reasoning_content": "", "content": ""}
            logprobs: list[tuple[str, float]] = []  # of tokens whose text is not sent yet
            sampling = self._drawn(ask, room)
            new, reason = ids, "length"
            while len(said) < sampling.max_tokens and reason == "length":
                piece = replace(sampling, max_tokens=min(PIECE, sampling.max_tokens - len(said)))
                completion = await self._run(self._generator.generate(session, new, piece))
                said += completion.ids
                logprobs += self._logprobs(ask, completion)
                new, reason = (), completion.finish_reason
                over = reason != "length" or len(said) >= sampling.max_tokens
                for part, text in _parts(ask, self._shown(ask, said), thinks, over=over).items():
                    if len(text) > len(sent[part]):
                        delta = {part: text[len(sent[part]) :]}
                        yield as_event(delta_chunk(ask, name, delta, logprobs))
                        sent[part], logprobs = text, []
            last = Reply(
                id=name,
                content="",
                thoughts="",
                calls=(),
                finish_reason="stop" if reason == "stop" else "length",
                prompt_tokens=len(ids),
                completion_tokens=len(said),
                logprobs=tuple(logprobs),
            )
            for event in chat_events(ask, [last]):
                yield as_event(event)
            yield b"data: [DONE]\n\n"
        finally:
            await asyncio.shield(self._run(self._generator.release(session)))

    def _shown(self, ask: Ask, ids: list[int]) -> str:
        text = self._renderer.decode(ids)
        for stop in ask.stop:
            text = text.partition(stop)[0]
        return text

    def _read(self, ask: Ask, prompt: int, completion: Completion) -> Reply:
        text = self._renderer.decode(completion.ids)
        name = f"{self._name}_{next(self._count)}"
        thoughts, content, calls = read_reply(text, ask, turn=name)
        reply = Reply(
            id=f"chatcmpl-{name}",
            content=content,
            thoughts=thoughts,
            calls=calls,
            finish_reason=completion.finish_reason,
            prompt_tokens=prompt,
            completion_tokens=len(completion.ids),
            logprobs=self._logprobs(ask, completion),
        )
        if calls:
            self._said[calls[0].id] = message_key(reply.message), text
            while len(self._said) > MAX_SAID:
                del self._said[next(iter(self._said))]
        return reply

    def _logprobs(self, ask: Ask, completion: Completion) -> tuple[tuple[str, float], ...]:
        if not ask.logprobs:
            return ()
        return tuple(
            (self._renderer.decode([token]), logprob)
            for token, logprob in zip(completion.ids, completion.logprobs, strict=True)
        )

    async def _likeliest(
        self,
        tells: Likeliest,
        ids: tuple[int, ...],
        said: tuple[int, ...],
        temperature: float,
        most: int,
    ) -> tuple[tuple[tuple[str, float], ...], ...]:
        """In the place of every token that was said, the likeliest with their log-probs. Runs where
        the generator runs, so that the two do not use the network at once."""
        return tuple(
            tuple(
                (self._renderer.decode([token]), math.log(share) if share > 0 else LEAST)
                for token, share in row
            )
            for row in tells(ids, said, temperature=temperature, most=most)
        )

    def _session(self, ask: Ask, choice: int = 0) -> Session:
        """The session of a reply. Equal seeds draw equal replies to equal conversations."""
        given = ask.settings.get("seed")
        seed = secrets.randbits(62) if given is None else derive_seed(given, "choice", choice)
        return Session(key=f"request-{next(self._count)}", seed=seed)

    async def _run(self, job: Awaitable[Any]) -> Any:
        async def run() -> Any:
            return await job

        found: Future[Any] = asyncio.run_coroutine_threadsafe(run(), self._engine)
        return await asyncio.wrap_future(found)

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            refuse_pages(request.headers)
            return
        given = request.headers.get("authorization") or ""
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise AskError(
                "this server wants its token as the API key", code="invalid_api_key", status=401
            )


def _parts(ask: Ask, text: str, thinks: bool, *, over: bool) -> dict[str, str]:
    """The thoughts and the words of what was sampled so far, without what may still change.

    Args:
        thinks: the prompt has opened the thoughts already.

    Example:
        >>> ask = Ask(api="chat", messages=())
        >>> _parts(ask, "<think>hm</think>No", False, over=True)
        {'reasoning_content': 'hm', 'content': 'No'}
        >>> _parts(ask, "<think>hm </thi", False, over=False)
        {'reasoning_content': 'hm', 'content': ''}
    """
    head, end, rest = text.partition("</think>")
    start = head.lstrip()
    if not over and not end and "<think>".startswith(start):
        return {"reasoning_content": "", "content": ""}
    if not thinks and not start.startswith("<think>"):
        return {"reasoning_content": "", "content": _ready(ask, text, over=over)}
    thoughts = start.removeprefix("<think>").lstrip()
    if not end:
        thoughts = thoughts if over else thoughts[: len(thoughts) - _begun("</think>", thoughts)]
        return {"reasoning_content": _ready(ask, thoughts, over=over).rstrip(), "content": ""}
    return {"reasoning_content": thoughts.rstrip(), "content": _ready(ask, rest, over=over)}


def _ready(ask: Ask, text: str, *, over: bool) -> str:
    """The text without its end, as long as that may be half of a sign or of a stop string."""
    if over:
        return text
    stops = max((len(stop) - 1 for stop in ask.stop), default=0)
    return text[: max(0, len(text) - max(stops, 1 if text.endswith("\ufffd") else 0))]


def _begun(mark: str, text: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    return next((size for size in range(len(mark), 0, -1) if text.endswith(mark[:size])), 0)
