"""The client that a program is given: OpenAI's own, with the episode's address and a way to give
rewards."""

import json
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any


class RewardError(RuntimeError):
    """A reward that the endpoint refused."""


class _Given:
    """What `reward` returns: an asynchronous program may await it, and needs not."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class _Rewards:
    """Gives rewards to replies."""

    turnwise_url: str

    def reward(self, value: float, reply: Any = None) -> _Given:
        """Adds to the reward of a reply: of the one given (a completion or its id), else of the
        newest.

        Raises:
            RewardError: there is no such reply, the value is no finite number, or the episode is
                over.
        """
        name = reply if reply is None or isinstance(reply, str) else str(reply.id)
        data = json.dumps({"reward": float(value), "id": name}).encode()
        request = urllib.request.Request(
            f"{self.turnwise_url}/reward", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise RewardError(_words(error)) from None
        return _Given()


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error)


def make_client(base_url: str, *, waits: bool) -> Any:
    """An `openai.AsyncOpenAI` where the program awaits its replies, else an `openai.OpenAI`.

    Raises:
        ImportError: openai is not installed.
    """
    try:
        import httpx
        import openai
    except ImportError as error:
        raise ImportError(
            "a program that takes `client` needs openai, not installed; run: pip install openai. A "
            "program that takes `base_url` may use any client"
        ) from error
    # No certificates are read: that takes longer than a reply, and the address is plain HTTP.
    verify = base_url.startswith("https://")
    kind = openai.AsyncOpenAI if waits else openai.OpenAI
    made: Any = type("PolicyClient", (_Rewards, kind), {"turnwise_url": base_url})
    http = httpx.AsyncClient if waits else httpx.Client
    return made(
        base_url=base_url,
        api_key="turnwise",
        http_client=http(verify=verify, timeout=httpx.Timeout(600, connect=10)),
    )
