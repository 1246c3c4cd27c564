"""The HTTP side of the inspector."""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from turnwise.envs.wire import decode
from turnwise.inspect.answers import Answers
from turnwise.inspect.folder import InspectError
from turnwise.inspect.page_files import PAGE_TYPES, page_file
from turnwise.inspect.play import Games, LoadPolicy
from turnwise.inspect.security import HEADERS, Guard
from turnwise.inspect.wire import to_bytes
from turnwise.procs.threads import DaemonThreads
from turnwise.serve.http import UNREAD, HttpServer, ServeError, listen
from turnwise.types import Json

logger = logging.getLogger(__name__)
CONNECTIONS = 64
WORKERS = 4
"""Requests that read files at the same time; their number bounds the memory."""
Handler = Callable[[Request], Awaitable[Response]]


class InspectServer:
    """Serves the page, what it asks about runs, and games.

    Args:
        roots: run directories, or folders of them.
        envs: environments of the user's own that may be played.
        load_policy: loads the policy of a run, to watch it; None: nothing can be played.
        token: needed beyond this machine.
    """

    def __init__(
        self,
        roots: list[Path],
        *,
        envs: Sequence[str] = (),
        load_policy: LoadPolicy | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        cache: Path | None = None,
    ) -> None:
        listener, self.url = listen(host, port, token=token)
        self._guard = Guard(token, port=listener.getsockname()[1])
        self.answers = Answers(roots, cache=cache)
        self._games: Games | None = None
        if load_policy is not None:
            self._games = Games(self.answers.found, envs, load_policy=load_policy)
        self._threads = DaemonThreads(WORKERS, "turnwise-inspect")
        app = Starlette(routes=self._routes(), exception_handlers={HTTPException: _no_such_page})
        app.router.redirect_slashes = False  # an answer of ours has our headers
        self._server = HttpServer(
            app, listener=listener, max_connections=CONNECTIONS, closing=self._closing
        )

    def __enter__(self) -> "InspectServer":
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait(self, seconds: float) -> bool:
        """True once the server has stopped; waits for at most so long."""
        return self._server.wait(seconds)

    def close(self) -> None:
        """Stops the server and all games."""
        self._server.stop()

    async def _closing(self) -> None:
        self._threads.shutdown()
        await asyncio.to_thread(self.answers.close)
        if self._games is not None:
            await asyncio.to_thread(self._games.close)

    def _routes(self) -> list[Route]:
        answers = self.answers
        reads: dict[str, Callable[[Request], Json]] = {
            "/api/runs": lambda request: answers.runs(),
            "/api/run/{run}": lambda request: answers.run(request.path_params["run"]),
            "/api/compare": lambda request: answers.compare(_names(request)),
        }
        of_run = {
            "metrics": answers.metrics,
            "episodes": answers.episodes,
            "groups": answers.groups,
            "episode": answers.episode,
            "gantt": answers.gantt,
        }
        for name, answer in of_run.items():
            reads[f"/api/run/{{run}}/{name}"] = lambda request, answer=answer: answer(
                request.path_params["run"], request.query_params
            )
        routes = [Route(path, self._reads(answer)) for path, answer in reads.items()]
        routes += [Route("/", self._page), Route("/static/{name:path}", self._page)]
        if self._games is not None:
            routes += self._play_routes(self._games)
        return routes

    def _play_routes(self, games: Games) -> list[Route]:
        async def envs(request: Request, body: dict[str, Json]) -> Json:
            return await self._in_thread(games.choices)

        async def start(request: Request, body: dict[str, Json]) -> Json:
            return await games.start(body)

        async def view(request: Request, body: dict[str, Json]) -> Json:
            return games.view(request.path_params["game"])

        async def step(request: Request, body: dict[str, Json]) -> Json:
            return await games.step(request.path_params["game"], body)

        async def end(request: Request, body: dict[str, Json]) -> Json:
            return await games.end(request.path_params["game"])

        return [
            Route("/api/envs", self._answers(envs)),
            Route("/api/play", self._answers(start), methods=["POST"]),
            Route("/api/play/{game}", self._answers(view)),
            Route("/api/play/{game}", self._answers(end), methods=["DELETE"]),
            Route("/api/play/{game}/step", self._answers(step), methods=["POST"]),
        ]

    def _reads(self, answer: Callable[[Request], Json]) -> Handler:
        async def read(request: Request, body: dict[str, Json]) -> Json:
            return await self._in_thread(lambda: to_bytes(answer(request)))

        return self._answers(read)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._threads.submit(work))

    def _answers(self, answer: Callable[[Request, dict[str, Json]], Awaitable[Json]]) -> Handler:
        async def handle(request: Request) -> Response:
            body = bytearray()
            try:
                self._check(request)
                if request.method == "POST":
                    await self._server.read(request, body)
                found = await answer(request, decode(bytes(body)) if body else {})
                data = found if isinstance(found, bytes) else to_bytes(found)
                return _respond(200, data, "application/json")
            except (InspectError, ServeError) as error:
                return _refuse(error.status, str(error))
            except ClientDisconnect:
                return Response(status_code=400)  # the client is gone, so it is not sent
            except ValueError as error:
                return _refuse(400, f"a malformed request: {error}")
            except sqlite3.Error as error:
                logger.warning("the index: %s", error)
                return _refuse(503, f"the index cannot be read: {error}; ask again")
            finally:
                self._server.held -= len(body)

        return handle

    def _check(self, request: Request, *, page: bool = False) -> None:
        self._guard.check(
            request.headers,
            writes=request.method not in ("GET", "HEAD"),
            page=page,
            cookie=request.cookies.get(self._guard.cookie),
            asked=request.query_params.get("token") if page else None,
        )

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        try:
            self._check(request, page=request.url.path == "/")
            data = page_file(name)
        except InspectError as error:
            return _refuse(error.status, str(error))
        kind = PAGE_TYPES[Path(name).suffix]
        response = _respond(200, data, kind)
        if self._guard.token is not None and request.query_params.get("token"):
            response.headers["Set-Cookie"] = self._guard.cookie_header()
        return response


def _names(request: Request) -> list[str]:
    """The runs to compare. A comma in a name is encoded in the url, so it is split first."""
    query = str(request.url.query)
    asked = next((part[5:] for part in query.split("&") if part.startswith("runs=")), "")
    return [unquote(name.replace("+", " ")) for name in asked.split(",") if name]


def _respond(status: int, data: bytes, kind: str) -> Response:
    close = {"Connection": "close"} if status in UNREAD else {}
    return Response(data, status_code=status, headers={**HEADERS, **close}, media_type=kind)


def _refuse(status: int, message: str) -> Response:
    return _respond(status, to_bytes({"error": message}), "application/json")


async def _no_such_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return _refuse(status, f"there is no {request.method} {request.url.path[:80]!r} here")
