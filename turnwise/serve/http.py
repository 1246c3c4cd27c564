"""JSON over HTTP with limits: authorization, request size, number of connections."""

import asyncio
import hmac
import ipaddress
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnwise.envs.wire import decode, encode
from turnwise.types import Json

logger = logging.getLogger(__name__)
Answer = Callable[[dict[str, Json], dict[str, str]], Mapping[str, Json] | Awaitable[Any]]
"""(the request's body, its path parameters) -> the answer's body."""
MAX_BODY = 16 * 1024 * 1024
MAX_READ = 4 * MAX_BODY
"""Maximum bytes of all requests that are being read or answered."""
IO_SECONDS = 60.0
"""Time limit for a client to send a request's body, or to read an answer."""
IDLE_SECONDS = 300
"""An idle connection is closed after this time. The client reconnects."""
STOP_SECONDS = 5
"""How long the server waits for unfinished answers when it stops."""


UNREAD = (401, 403, 408, 413, 503)
"""Statuses after which the connection is closed, because the request's body may be unread."""


class ServeError(Exception):
    """A refused request: an HTTP status, a kind that clients can distinguish, and a message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class HttpServer:
    """Serves an application on an event loop in its own thread.

    Args:
        listener: from `listen`.
        max_connections: above this, the longest idle connection is closed.
        closing: awaited on the server's event loop after the server has stopped.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        listener: socket.socket,
        max_connections: int,
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        self._listener, self._closing = listener, closing
        self.held = 0
        """Bytes of all requests that are read or answered now."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = {"limit": min(max_connections, descriptors // 2)}
        config = uvicorn.Config(
            app,
            http=type("Connection", (_Connection,), limit),
            interface="asgi3",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        config.load()  # imports, which its thread must not wait for
        self._server = uvicorn.Server(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop on which requests are answered, once it runs."""
        self._running = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnwise-serve", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._running.wait()

    def wait(self, seconds: float) -> bool:
        """True once the server has ended; waits for at most so long."""
        # Not join: in Python 3.11, a thread whose join a signal interrupted counts as ended.
        return self._ended.wait(seconds)

    def stop(self) -> None:
        """Stops the server. May be called before it was started and after it has stopped."""
        self._server.should_exit = True
        if self._thread.ident is None:
            self.start()
        self._thread.join()

    async def read(self, request: Request, body: bytearray) -> None:
        """Reads a request's body into `body`. Nothing of one that is announced as too large. The
        caller subtracts the length of `body` from `held` when it has answered."""
        too_large = ServeError(413, "bad_request", f"a request has at most {MAX_BODY} bytes")
        if int(request.headers.get("content-length") or 0) > MAX_BODY:
            raise too_large
        try:
            async with asyncio.timeout(IO_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    self.held += len(chunk)
                    if len(body) > MAX_BODY:
                        raise too_large
                    if self.held > MAX_READ:
                        raise ServeError(
                            503, "full", "too many bytes are being read at once; try later"
                        )
        except TimeoutError:
            raise ServeError(
                408, "bad_request", f"the request did not arrive within {IO_SECONDS:g} s"
            ) from None

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self._running.set()
            try:
                await self._server.serve(sockets=[self._listener])
            finally:
                self._listener.close()
                await self._closing()

        try:
            asyncio.run(serve())
        finally:
            self._ended.set()


class JsonServer(HttpServer):
    """Serves functions from JSON to JSON.

    The headers are checked before the body is read. A request is refused without the token or, if
    the server has none, from another site's page.

    Args:
        routes: by method and path, such as "POST /v1/sessions/{name}/open".
        listener: from `listen`, with the same token.
        token: the bearer token of requests. None: any program on this machine may send requests.
    """

    def __init__(
        self,
        routes: Mapping[str, Answer],
        *,
        listener: socket.socket,
        token: str | None,
        max_connections: int,
        closing: Callable[[], Awaitable[None]],
    ) -> None:
        self._token = token
        app = Starlette(
            routes=[
                Route(rule.split(" ")[1], self._endpoint(answer), methods=[rule.split(" ")[0]])
                for rule, answer in routes.items()
            ],
            exception_handlers={HTTPException: _no_such_page},
        )
        super().__init__(app, listener=listener, max_connections=max_connections, closing=closing)

    def _endpoint(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            body = bytearray()
            try:
                self._authorize(request.headers)
                found = answer(await self._read(request, body), request.path_params)
                return _respond(200, await found if isinstance(found, Awaitable) else found)
            except ServeError as error:
                return _refuse(error)
            except ClientDisconnect:
                return Response(status_code=400)  # the client is gone, so it is not sent
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                message = f"a malformed request: {type(error).__name__}: {error}"
                return _refuse(ServeError(400, "bad_request", message))
            finally:
                self.held -= len(body)

        return handle

    async def _read(self, request: Request, body: bytearray) -> dict[str, Json]:
        await self.read(request, body)
        data: Any = decode(bytes(body)) if body else {}
        if not isinstance(data, dict):
            raise ServeError(400, "bad_request", "a request is a JSON object")
        return cast(dict[str, Json], data)

    def _authorize(self, headers: Headers) -> None:
        if self._token:
            given, wanted = headers.get("authorization") or "", f"Bearer {self._token}"
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                raise ServeError(
                    401, "bad_request", "this server needs its token; set TURNWISE_TOKEN"
                )
            return
        refuse_pages(headers)


def refuse_pages(headers: Headers) -> None:
    """Refuses requests of web pages of other sites, for a server without a token. A page in a
    browser on this machine can reach loopback too: with its site as origin, or with a host name
    that resolves to this machine (DNS rebinding).

    Raises:
        ServeError: the request is one of those.
    """
    origin = headers.get("origin")
    for name in (f"//{headers.get('host') or ''}", *([origin] if origin is not None else [])):
        if not is_loopback(urlsplit(name).hostname or ""):
            raise ServeError(
                403,
                "bad_request",
                f"without a token this server answers only programs on this machine, got a "
                f"request for {name[:80]!r}; set TURNWISE_TOKEN on both sides",
            )


class _Connection(H11Protocol):
    """One of at most `limit` connections. uvicorn limits the memory per connection, but not their
    number."""

    limit = 0
    since = 0.0
    """When the connection became idle."""
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > self.limit:
            others = cast(set[_Connection], self.connections) - {self}
            silent = [other for other in others if not other.busy]
            oldest = min(silent, key=lambda other: other.since, default=self)
            self.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def busy(self) -> bool:
        """True while a request, at least its headers, has arrived and is not answered."""
        return bool(self.cycle) and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(IO_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unstick()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._unstick()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


def listen(host: str, port: int, *, token: str | None) -> tuple[socket.socket, str]:
    """(a socket that listens there, its url). Port 0: any free port.

    Raises:
        ValueError: other machines could reach it, and there is no token.
    """
    if not token and not is_loopback(host):
        raise ValueError(
            f"other machines can reach {host!r}, so the server needs a token; set TURNWISE_TOKEN"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    # Accepted sockets inherit this option. asyncio sets it only on sockets with an explicit
    # protocol number; without it, every answer waits 40 ms for the client's delayed
    # acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = f"[{host}]" if ":" in host else host
    return listener, f"http://{shown}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "a.org")]
        [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _respond(status: int, body: Mapping[str, Json], *, close: bool = False) -> Response:
    try:
        data = encode(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise ServeError(
            422, "env_error", f"the environment's answer is not JSON: {error}"
        ) from error
    headers = {"Connection": "close"} if close else None
    return Response(data, status_code=status, headers=headers, media_type="application/json")


def _refuse(error: ServeError) -> Response:
    problem = {"error": {"kind": error.kind, "message": str(error)}}
    return _respond(error.status, problem, close=error.status in UNREAD)


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    path = request.url.path[:80]
    return _refuse(ServeError(status, "bad_request", f"there is no {request.method} {path!r} here"))
