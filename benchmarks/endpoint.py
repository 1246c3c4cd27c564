"""What the endpoint costs: episodes of programs over HTTP with an engine that answers at once, or
with a model.

    python benchmarks/endpoint.py [--episodes 256] [--turns 8] [--workers 2]
        [--model DIR [--gguf FILE] [--device cuda] [--tokens 64]]

Prints requests per second, the CPU time that a request takes in the trainer's process, the time of
a request as its client sees it, and the memory of the trainer's process, for OpenAI's client and
for a plain HTTP client; and beside them the same number of turns of an environment without HTTP,
and the share of its speed that is kept. With a model every reply has exactly --tokens tokens; the
best of three rollouts counts.
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

CONTEXT = 2048
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


def scripted() -> tuple[Any, Any]:
    """(an engine that answers at once, its tokenizer)."""
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(
        lambda session, ids, call: "fine", tokenizer=tokenizer, end_id=tokenizer.eos_token_id
    )
    return generator, tokenizer


def with_model(given: argparse.Namespace) -> tuple[Any, Any]:
    """(the engine of a model, its tokenizer)."""
    import torch

    from turnwise.config.schema import ModelConfig
    from turnwise.generate.hf import HFGenerator
    from turnwise.models.policy import load_model, load_tokenizer

    config = ModelConfig(path=given.model, gguf_file=given.gguf)
    tokenizer = load_tokenizer(config)
    model: Any = load_model(config)
    generator = HFGenerator(
        model.to(given.device, torch.float32 if given.device == "cpu" else torch.bfloat16).eval(),
        tokenizer,
        slots=given.episodes,
        max_context=CONTEXT,
        end_of_turn=False,  # every reply is as long as it may be
    )
    return generator, tokenizer


def play(
    env: dict[str, Any], given: argparse.Namespace, engine: tuple[Any, Any], factories: Any = None
) -> Any:
    """(episodes, seconds, this process's CPU seconds) of the best rollout after the first."""
    generator, tokenizer = engine
    config = load_config(
        {
            "env": env,
            "rollout": {
                "train": {"env_groups": given.episodes, "group_size": 1},
                "max_context": CONTEXT if given.model else 1 << 20,
                "max_response_tokens": given.tokens,
                "isolation": "auto" if factories is None else "inline",
                "slots": given.episodes,
                "step_timeout": 600,
                "reset_timeout": 600,
            },
            "train": {"max_turn": given.turns + 1},
        }
    )
    tags = None if factories is None else {config.env.name: factories}
    proxy = AgentProxy(config, generator, tokenizer, factories=tags)
    best: Any = None
    try:
        proxy.play_all(0)
        for step in range(1, 4 if given.model else 2):
            started, worked = time.perf_counter(), time.process_time()
            found = proxy.play_all(step)
            seconds, busy = time.perf_counter() - started, time.process_time() - worked
            if best is None or seconds < best[1]:
                best = found, seconds, busy
        return best
    finally:
        proxy.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", help="a folder; without it the engine answers at once")
    parser.add_argument("--gguf")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    requests = given.episodes * given.turns
    engine = with_model(given) if given.model else scripted()

    def cpu_ms(busy: float) -> float:
        return round(1000 * busy / requests, 3)

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM % given.turns)
        _, native, busy = play({"name": "bandit"}, given, engine, lambda: Same(given.turns))
        figures = {
            "turns_per_second": round(requests / native),
            "cpu_ms": cpu_ms(busy),
        }
        print(f"{'environment':<12} {json.dumps(figures)}", flush=True)
        for name in ("plain", "with_openai"):
            options = {"workers": given.workers, "slots": -(-given.episodes // given.workers)}
            env = {"name": f"agent:{program}:{name}", "options": options}
            episodes, seconds, busy = play(env, given, engine)
            failed = [episode for episode in episodes if episode.status.failed]
            if failed:
                raise SystemExit(f"{len(failed)} episodes failed; the first: {failed[0].error}")
            times = sorted(
                took for episode in episodes for took in episode.turns[-1].info["seconds"]
            )
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            figures = {
                "requests_per_second": round(requests / seconds),
                "share_of_environment": round(native / seconds, 3),
                "cpu_ms": cpu_ms(busy),
                "p50_ms": round(1000 * times[len(times) // 2], 1),
                "p99_ms": round(1000 * times[int(0.99 * len(times))], 1),
                "memory_mb": round(memory),
            }
            print(f"{name:<12} {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()
