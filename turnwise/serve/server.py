"""The HTTP side of a served environment."""

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.serve.client import VERSION
from turnwise.serve.http import Answer, JsonServer, listen
from turnwise.serve.sessions import Sessions

CONNECTIONS, CONNECTIONS_PER_SESSION = 64, 4
"""Limits of open connections: a session needs its client's, a heartbeat's and some for waiting
clients."""


class EnvServer:
    """Serves one environment: `turnwise.serve.client.RemoteEnv` is the client.

    Beyond loopback it needs a token, because every caller can run the environment.

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
        listener, self.url = listen(host, port, token=token)
        try:
            self.sessions = Sessions(
                env, rollout, max_sessions=max_sessions, idle_timeout=idle_timeout
            )
        except BaseException:
            listener.close()
            raise
        self._server = JsonServer(
            _routes(self.sessions),
            listener=listener,
            token=token,
            max_connections=CONNECTIONS + CONNECTIONS_PER_SESSION * self.sessions.max_sessions,
            closing=self.sessions.close,
        )

    def __enter__(self) -> "EnvServer":
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait(self, seconds: float) -> bool:
        """True once the server has stopped; waits for at most so long."""
        return self._server.wait(seconds)

    def close(self) -> None:
        """Stops the server, all sessions and their worker processes."""
        self._server.stop()


def _routes(sessions: Sessions) -> dict[str, Answer]:
    session = f"/{VERSION}/sessions/{{name}}"
    return {
        f"GET /{VERSION}/health": lambda body, path: sessions.health(),
        f"GET /{VERSION}/spec": lambda body, path: sessions.spec(),
        f"POST /{VERSION}/task": lambda body, path: sessions.task(
            int(body["seed"]), str(body["split"])
        ),
        f"POST {session}/open": lambda body, path: sessions.open(path["name"]),
        f"POST {session}/heartbeat": lambda body, path: sessions.heartbeat(path["name"]),
        f"POST {session}/close": lambda body, path: sessions.close_session(path["name"]),
        f"POST {session}/{{what}}": lambda body, path: sessions.call(
            path["name"], path["what"], body
        ),
    }
