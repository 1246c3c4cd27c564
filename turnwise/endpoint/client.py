"""The client that a program is given: OpenAI's own, with the episode's address and a way to give
rewards."""

import json
import urllib.request
from typing import Any


class _Rewards:
    """Gives rewards to replies."""

    turnwise_url: str

    def reward(self, value: float, reply: Any = None) -> None:
        """Adds to the reward of a reply: of the one given (a completion or its id), else of the
        newest."""
        name = reply if reply is None or isinstance(reply, str) else str(reply.id)
        data = json.dumps({"reward": float(value), "id": name}).encode()
        request = urllib.request.Request(
            f"{self.turnwise_url}/reward", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


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
