"""The HTTP side of a served environment. Standard library only."""

import hmac
import logging
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import EnvError
from turnwise.envs.wire import decode, encode
from turnwise.serve.client import VERSION
from turnwise.serve.sessions import ServeError, Sessions
from turnwise.types import Json

logger = logging.getLogger(__name__)
MAX_BODY = 64 * 1024 * 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class EnvServer:
    """Serves one environment: `turnwise.serve.client.RemoteEnv` is the client.

    Beyond loopback it wants a token, because who may call it may run the environment.

    Example:
        >>> from turnwise.serve.client import RemoteEnv
        >>> with EnvServer(EnvConfig(name="bandit"), RolloutConfig()) as server:
        ...     env = RemoteEnv(server.url)
        ...     opening = env.reset(env.make_task(0, "train"))
        ...     env.close()
        >>> opening.messages[0].role
        'system'
    """

    def __init__(
        self,
        env: EnvConfig,
        rollout: RolloutConfig,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_sessions: int = 64,
        idle_timeout: float = 60.0,
    ) -> None:
        if host not in LOOPBACK and not token:
            raise ValueError(f"serving on {host!r} reaches beyond this machine and needs a token; set TURNWISE_TOKEN")
        self.sessions = Sessions(env, rollout, max_sessions=max_sessions, idle_timeout=idle_timeout)
        handler = type("Handler", (_Handler,), {"sessions": self.sessions, "token": token})
        try:
            self._server = _HTTPServer((host, port), handler)
        except OSError:
            self.sessions.close()
            raise
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "EnvServer":
        self._thread = threading.Thread(target=self.serve_forever, name="turnwise-serve", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self.close()

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        self._server.server_close()
        self.sessions.close()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke: its client asks again, or its session ends by itself."""
        logger.debug("connection of %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "turnwise"
    sys_version = ""
    wbufsize = 1 << 16  # an answer is written at once
    timeout = 300.0  # of a silent connection; a client connects anew
    sessions: Sessions
    token: str | None

    def setup(self) -> None:
        super().setup()
        cast(socket.socket, self.connection).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self._handle(read=False)

    def do_POST(self) -> None:
        self._handle(read=True)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _handle(self, *, read: bool) -> None:
        try:
            body = self._read() if read else {}
            self._authorize()
            self._answer(200, self._route(body))
        except ServeError as error:
            self._answer(error.status, {"error": {"kind": error.kind, "message": str(error)}})
        except EnvError as error:
            self._answer(422, {"error": {"kind": "env_error", "message": str(error)}})
        except FutureTimeoutError:
            self._answer(504, {"error": {"kind": "env_timeout", "message": "the environment did not answer in time"}})
        except (KeyError, TypeError, ValueError) as error:
            message = f"a malformed request: {type(error).__name__}: {error}"
            self._answer(400, {"error": {"kind": "bad_request", "message": message}})

    def _route(self, body: Mapping[str, Json]) -> dict[str, Json]:
        words = self.path.strip("/").split("/")
        match words:
            case [version, *_] if version != VERSION:
                raise ServeError(404, "bad_request", f"this server speaks /{VERSION}/, got {self.path[:80]!r}")
            case [_, "health"]:
                return self.sessions.health()
            case [_, "spec"]:
                return self.sessions.spec()
            case [_, "task"]:
                return self.sessions.task(int(body["seed"]), str(body["split"]))
            case [_, "sessions", name, "open"]:
                return self.sessions.open(name)
            case [_, "sessions", name, "heartbeat"]:
                return self.sessions.heartbeat(name)
            case [_, "sessions", name, "close"]:
                return self.sessions.close_session(name)
            case [_, "sessions", name, "reset" | "step" | "finish" as what]:
                return self.sessions.call(name, what, body)
            case _:
                raise ServeError(404, "bad_request", f"there is nothing at {self.path[:80]!r}")

    def _read(self) -> dict[str, Json]:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_BODY:
            self.close_connection = True
            raise ServeError(413, "bad_request", f"a request has at most {MAX_BODY} bytes")
        body = decode(self.rfile.read(size)) if size else {}
        if not isinstance(cast(Any, body), dict):
            raise ServeError(400, "bad_request", "a request is a JSON object")
        return body

    def _authorize(self) -> None:
        given = self.headers.get("Authorization") or ""
        if self.token and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise ServeError(401, "bad_request", "this server wants its token; set TURNWISE_TOKEN")

    def _answer(self, status: int, body: Mapping[str, Json]) -> None:
        try:
            data = encode(body)
        except ValueError as error:
            status = 422
            data = encode({"error": {"kind": "env_error", "message": f"the environment's answer is no JSON: {error}"}})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
