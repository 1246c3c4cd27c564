# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
"""The endpoint: the HTTP server to which programs send their requests. One for all episodes of a
process."""

import asyncio
import hashlib
import hmac
import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from turnwise.endpoint.asks import Ask, AskError, Rules, read_chat, read_responses
from turnwise.endpoint.episode import AgentEpisode, Outcome, Pending
from turnwise.endpoint.replies import (
    Reply,
    as_event,
    chat_events,
    chat_json,
    first_chunk,
    responses_events,
    responses_json,
    waiting_chunk,
)
from turnwise.endpoint.worker import ELSEWHERE
from turnwise.envs.base import EnvError
from turnwise.envs.wire import decode
from turnwise.serve.http import HttpServer, ServeError
from turnwise.types import Json

KEEP_ALIVE = 15.0
"""Seconds between two signs of life in a stream that waits for the policy."""
POLL = 10.0
"""Seconds that a worker waits for the next task in one request."""
MAX_CONNECTIONS = 8192
MAX_OVER = 100_000
"""Tokens of episodes that are over which are remembered, to answer late requests rightly."""
_RETRY = (429, 503)
_PATH = re.compile(
    r"(?:/e/(?P<token>[^/]+)(?:/role/(?P<role>[^/]+))?)?"
    r"/v1/(?P<api>chat/completions|responses|reward|done|models)"
    r"|/work/(?P<queue>[^/]+)/(?P<work>next|alive)|/(?P<own>health)"
)
"""The last group names the page."""


class Endpoint:
    """Serves the requests of programs, and hands tasks to the workers that run them.

    Args:
        listener: from `turnwise.serve.http.listen`.
        work_token: what workers must carry.
    """

    def __init__(self, listener: socket.socket, *, work_token: str) -> None:
        self._work_token = work_token
        self._episodes: dict[str, AgentEpisode] = {}
        self._over: dict[str, tuple[str, str]] = {}
        """(why, in a word for programs) of episodes that are over, by their tokens."""
        self._programs: set[str] = set()
        """Labels of the programs that workers elsewhere may have."""
        self._queues = defaultdict[str, asyncio.Queue[AgentEpisode]](asyncio.Queue)
        self._seen: dict[str, float] = {}
        self._pages: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
            "chat/completions": ("POST", self._chat),
            "responses": ("POST", self._responses),
            "reward": ("POST", self._reward),
            "done": ("POST", self._done),
            "models": ("GET", self._models),
            "next": ("POST", self._next_task),
            "alive": ("POST", self._alive),
            "health": ("GET", self._health),
        }
        self._server = HttpServer(
            self._serve, listener=listener, max_connections=MAX_CONNECTIONS, closing=self._closing
        )
        self._server.start()
        assert self._server.loop is not None
        self.loop = self._server.loop
        self._watch = asyncio.run_coroutine_threadsafe(self._watch_leases(), self.loop)

    def close(self) -> None:
        self._watch.cancel()
        self._server.stop()

    # The following run on the endpoint's event loop.

    def admit(self, program: str) -> None:
        """Makes a program known that workers elsewhere run. Its queue has its label."""
        self._programs.add(program)

    def open(self, episode: AgentEpisode, *, queue: str) -> None:
        """Makes an episode known, and its task one that a worker of the queue may take."""
        self._episodes[episode.token] = episode
        self._queues[queue].put_nowait(episode)

    def forget(self, episode: AgentEpisode) -> None:
        """The episode is over for the rollout. Late requests are told so."""
        episode.close("the rollout has ended it")
        if self._episodes.pop(episode.token, None) is not None:
            self._over[episode.token] = episode.over or "", episode.over_code
            while len(self._over) > MAX_OVER:
                del self._over[next(iter(self._over))]
        self._seen.pop(episode.token, None)

    async def _closing(self) -> None:
        for episode in list(self._episodes.values()):
            self.forget(episode)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for token, seen in list(self._seen.items()):
                episode = self._episodes.get(token)
                if episode is None:
                    self._seen.pop(token, None)
                elif now - seen > episode.lease and not episode.outcome.done():
                    self._seen.pop(token, None)
                    silent = f"{episode.lease:g} s"
                    error = f"the worker of this episode gave no sign of life for {silent}"
                    episode.end(Outcome(error=error, lost=True))

    # Requests.

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request: few pages and many requests, so one expression is the router."""
        request = Request(scope, receive)
        found = _PATH.fullmatch(scope["path"])
        method, page = self._pages[found[str(found.lastgroup)]] if found else ("", None)
        if found and page is not None and method == scope["method"]:
            scope["path_params"] = found.groupdict()
            response = await page(request)
        else:
            response = await no_such_page(request, HTTPException(405 if found else 404))
        await response(scope, receive, send)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _responses(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body = bytearray()
        try:
            episode = self._episode(request)
            await self._server.read(request, body)
            data = read_object(body)
            digest = hashlib.blake2b(body, digest_size=16).digest()
            ask = (read_chat if chat else read_responses)(data, Rules(ignore=episode.ignore))
            role = request.path_params.get("role")
            if role:
                ask = replace(ask, role=role)
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            pending = episode.ask(ask, digest=digest, again=again)
        except Exception as error:
            return refusal(error)
        finally:
            self._server.held -= len(body)
        if ask.stream:
            return StreamingResponse(
                _stream(ask, episode, pending),
                media_type="text/event-stream",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            )
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({pending.answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.answer.done():
                episode.leave(pending)
                return Response(status_code=499)  # the client has hung up
            replies = pending.answer.result()
        except (AskError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                episode.leave(pending)
                raise
            return refusal(error)
        finally:
            gone.cancel()
        return JSONResponse(_whole(ask, replies))

    async def _reward(self, request: Request) -> Response:
        return await self._tell(
            request,
            lambda episode, data: episode.reward(
                data.get("reward"), None if data.get("id") is None else str(data["id"])
            ),
        )

    async def _done(self, request: Request) -> Response:
        def end(episode: AgentEpisode, data: Mapping[str, Any]) -> None:
            error = data.get("error")
            if error is not None:
                episode.end(Outcome(error=str(error), lost=data.get("lost") is True))
                return
            try:
                episode.end(Outcome.read(data))
            except EnvError as wrong:
                episode.end(Outcome(error=str(wrong)))

        return await self._tell(request, end)

    async def _tell(self, request: Request, tell: Any) -> Response:
        body = bytearray()
        try:
            episode = self._episode(request)
            await self._server.read(request, body)
            tell(episode, read_object(body))
            return JSONResponse({"ok": True})
        except Exception as error:
            return refusal(error)
        finally:
            self._server.held -= len(body)

    async def _models(self, request: Request) -> Response:
        try:
            self._episode(request)
        except AskError as error:
            return refusal(error)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "turnwise"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"episodes": len(self._episodes)})

    def _episode(self, request: Request) -> AgentEpisode:
        token = request.path_params.get("token")
        if token is None:
            given = request.headers.get("authorization") or ""
            token = given.removeprefix("Bearer ").strip() or request.headers.get("x-api-key") or ""
        episode = self._episodes.get(token)
        if episode is not None:
            if token in self._seen:
                self._seen[token] = time.monotonic()
            return episode
        if token in self._over:
            why, code = self._over[token]
            raise AskError(f"this episode is over: {why}", code=code, status=410)
        raise AskError(
            "no episode has this token; use the base URL and the key that the program was given",
            code="invalid_api_key",
            status=401,
        )

    # Workers.

    async def _next_task(self, request: Request) -> Response:
        refused = self._refuse_worker(request)
        if refused is not None:
            return refused
        name = request.path_params["queue"]
        if name == ELSEWHERE:
            body = bytearray()
            try:
                await self._server.read(request, body)
                name = self._program(read_object(body).get("program"))
            except Exception as error:
                return refusal(error)
            finally:
                self._server.held -= len(body)
        queue = self._queues[name]
        deadline = time.monotonic() + POLL
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or await request.is_disconnected():
                return JSONResponse({})
            try:
                episode = await asyncio.wait_for(queue.get(), min(left, 1.0))
            except TimeoutError:
                continue
            if episode.over is None and not episode.outcome.done():
                self._seen[episode.token] = time.monotonic()
                if not episode.taken.done():
                    episode.taken.set_result(None)
                return JSONResponse(
                    {
                        "token": episode.token,
                        "task": episode.task.to_json(),
                        "base_url": f"{_asked_url(request)}/e/{episode.token}/v1",
                    }
                )

    def _program(self, label: Any) -> str:
        """The queue of a program that a worker elsewhere has.

        Raises:
            AskError: the run has other programs.
        """
        if not isinstance(label, str) or (self._programs and label not in self._programs):
            known = ", ".join(map(repr, sorted(self._programs)))
            raise AskError(
                f"this run has no program {label!r}, but {known}; start the worker with that one",
                status=409,
            )
        return f"{ELSEWHERE} {label}"

    async def _alive(self, request: Request) -> Response:
        refused = self._refuse_worker(request)
        if refused is not None:
            return refused
        body = bytearray()
        try:
            await self._server.read(request, body)
            tokens = read_object(body).get("tokens")
        except Exception as error:
            return refusal(error)
        finally:
            self._server.held -= len(body)
        over: list[str] = []
        for token in tokens if isinstance(tokens, list) else []:
            episode = self._episodes.get(token) if isinstance(token, str) else None
            if episode is None or episode.over is not None:
                over.append(token)
            elif token in self._seen:
                self._seen[token] = time.monotonic()
        return JSONResponse({"over": over})

    def _refuse_worker(self, request: Request) -> Response | None:
        given = request.headers.get("authorization") or ""
        if hmac.compare_digest(given.encode(), f"Bearer {self._work_token}".encode()):
            return None
        words = "the endpoint does not know this worker's token; set TURNWISE_TOKEN to the run's"
        return refusal(AskError(words, status=401))


async def _gone(request: Request) -> None:
    """Returns when the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(ask: Ask, episode: AgentEpisode, pending: Pending) -> AsyncIterator[bytes]:
    named = ask.api == "responses"
    try:
        if not named:
            yield as_event(first_chunk(ask, pending.name))
        while not pending.answer.done():
            await asyncio.wait({pending.answer}, timeout=KEEP_ALIVE)
            if not pending.answer.done():
                yield b": waiting\n\n" if named else as_event(waiting_chunk(ask, pending.name))
        try:
            replies = pending.answer.result()
        except AskError as error:
            yield as_event({"type": "error", **_error(error)}, named=named)
            return
        if named:
            for number, event in enumerate(responses_events(ask, replies[0])):
                yield as_event({**event, "sequence_number": number}, named=True)
        else:
            for event in chat_events(ask, replies):
                yield as_event(event)
            yield b"data: [DONE]\n\n"
    except (asyncio.CancelledError, GeneratorExit):
        episode.leave(pending)
        raise


def _whole(ask: Ask, replies: list[Reply]) -> dict[str, Json]:
    return chat_json(ask, replies) if ask.api == "chat" else responses_json(ask, replies[0])


def read_object(body: bytearray) -> Mapping[str, Any]:
    """The JSON object of a request's body."""
    try:
        return decode(bytes(body))
    except ValueError as error:
        raise AskError(f"the body is no JSON object: {error}") from error


def _asked_url(request: Request) -> str:
    """The endpoint's URL as the worker reaches it, which may be another name than ours."""
    return f"{request.url.scheme}://{request.url.netloc}"


def _error(error: AskError) -> dict[str, Json]:
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.param,
            "code": error.code,
        }
    }


def refusal(error: Exception) -> Response:
    """An error in OpenAI's form. Internal errors are raised again."""
    if isinstance(error, ServeError):
        error = AskError(str(error), status=error.status)
    elif isinstance(error, ClientDisconnect):
        error = AskError("the client has hung up", status=400)
    elif isinstance(error, EnvError | TypeError | ValueError | KeyError | RecursionError):
        if not isinstance(error, AskError):
            error = AskError(f"a malformed request: {error}")
    else:
        raise error
    retry = "true" if error.status in _RETRY else "false"
    headers = {"x-should-retry": retry}
    if error.status in (401, 408, 413, 503):
        headers["Connection"] = "close"  # the rest of the request may still be coming
    content = json.dumps(_error(error), ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, error.status, headers=headers, media_type="application/json")


async def no_such_page(request: Request, error: Exception) -> Response:
    """The answer where a path or a method is unknown."""
    status = getattr(error, "status_code", 404)
    path = request.url.path[:80]
    return refusal(AskError(f"there is no {request.method} {path!r} here", status=status))
