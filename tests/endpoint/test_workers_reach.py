"""What a worker's surroundings do to the requests of its programs."""

import sys
from pathlib import Path
from typing import Any

import pytest
from agent_parts import play

from turnwise.types import Status

DEAD = "http://127.0.0.1:9"
"""A proxy that nobody runs."""
SOLVE = """
import json
import os
import urllib.request

import openai


def solve(task, client, base_url):
    question = {"role": "user", "content": "Hi"}
    client.chat.completions.create(model="policy", messages=[question])
    openai.OpenAI(base_url=base_url, api_key="x").chat.completions.create(
        model="policy", messages=[question]
    )
    client.reward(0.5)
    assert os.environ["NO_PROXY"].startswith("example.org")
    return 1.0


if __name__ == "__main__":
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    urllib.request.urlopen(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body).read()
    print(1.5)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_proxies_are_not_asked_for_the_endpoint(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")
    (tmp_path / "solve.py").write_text(SOLVE)
    limits: dict[str, Any] = {"step_timeout": 600.0, "reset_timeout": 600.0}
    options = {"workers": workers}
    (episode,), _ = play(f"agent:{tmp_path}/solve.py:solve", options=options, **limits)
    assert episode.status is Status.COMPLETED, episode.error
    assert episode.reward == 1.5
    command = f"command:{sys.executable} {tmp_path}/solve.py"
    (episode,), _ = play(command, options=options, **limits)
    assert episode.status is Status.COMPLETED, episode.error
    assert episode.reward == 1.5
