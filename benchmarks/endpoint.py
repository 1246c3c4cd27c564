"""What the endpoint costs: episodes of programs over HTTP with an engine that answers at once.

    python benchmarks/endpoint.py [--episodes 256] [--turns 8] [--workers 2]

Prints requests per second, the time of a request as its client sees it, and the memory of the
trainer's process, for OpenAI's client and for a plain HTTP client; and beside them the same number
of turns of an environment without HTTP.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from turnwise.config.load import load_config
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Observation, StepResult, Task

PROGRAM = """
import http.client
import json
import time
from urllib.parse import urlsplit

TURNS = %d


def with_openai(task, client):
    messages, seconds = [{"role": "user", "content": f"Task {task.seed}"}], []
    for _ in range(TURNS):
        started = time.perf_counter()
        answer = client.chat.completions.create(model="policy", messages=messages)
        seconds.append(time.perf_counter() - started)
        messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    return {"reward": 1.0, "info": {"seconds": seconds}}


def plain(task, base_url):
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    messages, seconds = [{"role": "user", "content": f"Task {task.seed}"}], []
    for _ in range(TURNS):
        started = time.perf_counter()
        body = json.dumps({"messages": messages})
        connection.request("POST", where.path + "/chat/completions", body)
        answer = json.loads(connection.getresponse().read())
        seconds.append(time.perf_counter() - started)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"reward": 1.0, "info": {"seconds": seconds}}
"""


class Same:
    """The same conversation as an environment."""

    max_turns = None

    def __init__(self, turns: int) -> None:
        self._turns, self._played = turns, 0

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"same/{split}/{seed}", seed=seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._played = 0
        return Observation(messages=(Message(role="user", content=f"Task {task.seed}"),))

    def step(self, message: Message) -> StepResult:
        self._played += 1
        over = self._played == self._turns
        reply = Message(role="user", content="Go on.")
        return StepResult(messages=(reply,), reward=float(over), terminated=over)

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0)

    def close(self) -> None:
        """Nothing to release."""


def play(env: dict[str, Any], episodes: int, turns: int, factories: Any = None) -> Any:
    """(episodes, seconds) of the second of two rollouts."""
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(
        lambda session, ids, call: "fine", tokenizer=tokenizer, end_id=tokenizer.eos_token_id
    )
    config = load_config(
        {
            "env": env,
            "rollout": {
                "train": {"env_groups": episodes, "group_size": 1},
                "max_context": 1 << 20,
                "max_response_tokens": 64,
                "isolation": "auto" if factories is None else "inline",
                "step_timeout": 600,
                "reset_timeout": 600,
            },
            "train": {"max_turn": turns + 1},
        }
    )
    tags = None if factories is None else {config.rollout.train.tags[0]: factories}
    proxy = AgentProxy(config, generator, tokenizer, factories=tags)
    try:
        proxy.play_all(0)
        started = time.perf_counter()
        found = proxy.play_all(1)
        return found, time.perf_counter() - started
    finally:
        proxy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    requests = given.episodes * given.turns
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM % given.turns)
        _, seconds = play(
            {"name": "bandit"}, given.episodes, given.turns, lambda: Same(given.turns)
        )
        print(f"{'environment':<12} {requests / seconds:8.0f} turns/s")
        for name in ("plain", "with_openai"):
            options = {"workers": given.workers, "slots": -(-given.episodes // given.workers)}
            env = {"name": f"agent:{program}:{name}", "options": options}
            episodes, seconds = play(env, given.episodes, given.turns)
            assert all(not episode.status.failed for episode in episodes), episodes[0].error
            times = sorted(
                took for episode in episodes for took in episode.turns[-1].info["seconds"]
            )
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            figures = {
                "requests_per_second": round(requests / seconds),
                "p50_ms": round(1000 * times[len(times) // 2], 1),
                "p99_ms": round(1000 * times[int(0.99 * len(times))], 1),
                "memory_mb": round(memory),
            }
            print(f"{name:<12} {json.dumps(figures)}")


if __name__ == "__main__":
    main()
