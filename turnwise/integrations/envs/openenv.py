# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""An environment behind an OpenEnv server: `openenv:http://host:8000`."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import BadActionError, BaseEnv
from turnwise.envs.gate import words
from turnwise.integrations.envs.common import require

TEXT_FIELDS = (
    "text",
    "message",
    "prompt",
    "observation",
    "content",
    "output",
    "result",
    "response",
)

REFUSALS = ("(code: VALIDATION_ERROR)", "(code: EXECUTION_ERROR)", "(code: INVALID_JSON)")
"""How the client's error ends where the server could not play an action. The session goes on."""


class OpenEnvEnv(BaseEnv):
    """One session of an OpenEnv server. An object holds one connection, which is opened at the
    first reset. An action that the server refuses is a failed action: the model is told why, and
    the episode goes on.

    Args:
        url: where the server is.
        action_field: the field of the server's action that holds the model's answer. None: its only
            text field, as the server's /schema tells; where it has several the answer must be a
            JSON object with all of them.
        observation_field: the field of the observation to show. None: a well-known one, or the
            whole as JSON.
        instruction: what the model is told.
        timeout: seconds for one answer of the server.
        reset_options: passed to every reset, besides the seed.
        seeded: pass the seed to the server's reset. False for servers that do not take one.
    """

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        observation_field: str | None = None,
        instruction: str = "",
        timeout: float = 60.0,
        reset_options: Mapping[str, Any] | None = None,
        seeded: bool = True,
    ) -> None:
        require("openenv", extra="openenv")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"an OpenEnv server has a url such as http://host:8000, got {url!r}")
        self.instruction = instruction
        self._url, self._timeout = url.rstrip("/"), timeout
        self._action_field = action_field or self._only_text_field()
        self._observation_field = observation_field
        self._reset_options, self._seeded = dict(reset_options or {}), seeded
        self._client: Any = None

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None
    ) -> str:
        if self._client is None:
            client = require("openenv.core.generic_client", extra="openenv").GenericEnvClient
            self._client = client(base_url=self._url, message_timeout_s=self._timeout).sync()
        seeds = {"seed": seed or 0} if self._seeded else {}
        return self._text(self._client.reset(**seeds, **self._reset_options).observation)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        body: Any = {self._action_field: action} if self._action_field else self._parse(action)
        if body is None:
            raise BadActionError(
                "Answer with a JSON object that has the fields of an action.",
                info={"malformed": True},
            )
        try:
            result = self._client.step(body)
        except RuntimeError as error:
            too_deep = isinstance(error, RecursionError)  # to be sent
            if not too_deep and not any(code in str(error) for code in REFUSALS):
                raise
            raise BadActionError(
                f"The action was refused. {words(error)}", info={"refused": words(error)}
            ) from error
        reward = 0.0 if result.reward is None else float(result.reward)
        return (
            self._text(result.observation),
            reward,
            bool(result.done),
            dict(result.metadata or {}),
        )

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, Mapping):
            return str(observation)
        if self._observation_field is not None:
            if self._observation_field not in observation:
                raise ValueError(
                    f"the observation has no field {self._observation_field!r}, only "
                    f"{', '.join(observation)}"
                )
            return str(observation[self._observation_field])
        for name in TEXT_FIELDS:
            if isinstance(observation.get(name), str) and observation[name]:
                return observation[name]
        shown = {
            key: value
            for key, value in observation.items()
            if key not in ("metadata", "done", "reward")
        }
        return json.dumps(shown, ensure_ascii=False, default=str)

    def _only_text_field(self) -> str | None:
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=self._timeout) as answer:
                schema = json.load(answer)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise ConnectionError(
                f"no action schema at {self._url}/schema ({type(error).__name__}: {error}); is the "
                "server running? "
                "Otherwise set the option action_field"
            ) from error
        fields = {
            name: spec for name, spec in schema.get("properties", {}).items() if name != "metadata"
        }
        needed = [name for name in schema.get("required", fields) if name in fields]
        texts = [name for name in needed if fields[name].get("type") == "string"]
        return texts[0] if len(needed) == 1 and texts else None

    @staticmethod
    def _parse(action: str) -> dict[str, Any] | None:
        try:
            value = json.loads(action)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None
