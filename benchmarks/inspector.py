"""The inspector on a run of many episodes: when the first answers come and the page is painted, and
how much memory it takes.

    python benchmarks/inspector.py [--episodes 100000] [--steps 800] [--tokens 240] [--folder DIR]

The run is made up: episodes of four turns with boards, token ids and log-probs, as a trainer would
store them. The server is a process of its own with an empty cache, so that nothing is indexed when
the first questions come. Where Chromium and playwright are installed, the page is opened in a
browser, from another such process. With --folder the run is kept, and used again if it is there.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turnwise.config.schema import Config, LogConfig
from turnwise.log.store import RunDirectory
from turnwise.types import Completion, Episode, Message, Status, Task, Turn

WORDS = ("up", "down", "left", "right", "the", "goal", "is", "near", "hole", "walk", "to", "and")
NEEDLE = "a needle in the hay"


def make_run(folder: Path, *, episodes: int, steps: int, tokens: int) -> Path:
    """A run directory with so many episodes."""
    rng = random.Random(0)
    config = Config.model_validate({"train": {"steps": steps}})
    with RunDirectory.create(LogConfig(dir=str(folder), name="many"), config) as run:
        for step in range(1, steps + 1):
            count = episodes * step // steps - episodes * (step - 1) // steps
            batch = [made_up(rng, step, index, tokens=tokens) for index in range(count)]
            if step == steps // 2:
                last = Message(role="user", content=NEEDLE)
                turn = batch[-1].turns[-1]
                fields = {name: getattr(turn, name) for name in Turn.__dataclass_fields__}
                turns = (*batch[-1].turns[:-1], Turn(**{**fields, "messages": (last,)}))
                fields = {name: getattr(batch[-1], name) for name in Episode.__dataclass_fields__}
                batch[-1] = Episode(**{**fields, "turns": turns})
            run.write_episodes(step, batch)
            run.write_metrics(step, {name: rng.random() for name in METRICS})
    return run.path


METRICS = ("rollout/reward", "rollout/success", *(f"train/metric_{index}" for index in range(60)))


def made_up(rng: random.Random, step: int, index: int, *, tokens: int) -> Episode:
    """An episode as a game of words and boards would leave it."""
    turns: list[Turn] = []
    size = tokens // 4
    won = rng.random() < 0.4
    for at in range(4):
        said = Completion(
            ids=tuple(rng.randrange(30_000) for _ in range(size)),
            logprobs=tuple(math.log(rng.random()) for _ in range(size)),
            finish_reason="stop",
        )
        board = "\n".join(" ".join(rng.choice("_OPG") for _ in range(6)) for _ in range(6))
        turns.append(
            Turn(
                prompt_ids=tuple(rng.randrange(30_000) for _ in range(40)),
                completion=said,
                text=" ".join(rng.choice(WORDS) for _ in range(size)),
                restart=at == 0,
                action=rng.choice(WORDS[:4]),
                messages=(Message(role="user", content=board),),
                reward=float(won and at == 3),
                info={"success": won and at == 3},
            )
        )
    group = index // 8
    return Episode(
        id=f"train-{step:06d}-g{group}-m{index % 8}",
        task=Task(id=f"made_up/train/{step}-{group}", seed=step * 1000 + group),
        group_id=group,
        index=index % 8,
        tag="made_up",
        seed=index,
        noise_seed=index,
        prompt=(Message(role="user", content="Find the goal."),),
        turns=tuple(turns),
        status=Status.COMPLETED if won else Status.TRUNCATED_TURNS,
    )


class Server:
    """`turnwise inspect` as a process of its own."""

    def __init__(self, run: Path, cache: Path) -> None:
        self.started = time.perf_counter()
        words = [sys.executable, "-m", "turnwise", "inspect", str(run), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split(" at ")[1].strip().rstrip("/")

    def get(self, path: str) -> tuple[float, Any]:
        """(seconds, the answer)."""
        start = time.perf_counter()
        with urllib.request.urlopen(self.url + path) as answer:
            data = answer.read()
        kind = json.loads(data) if path.startswith("/api") else data
        return time.perf_counter() - start, kind

    def memory(self) -> tuple[float, float]:
        """(resident now, the most so far), in MB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        now, most = (int(found[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
        return now, most

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


PAINTED = """() => new Promise(found => {
  const seen = list => list.length && found(list[0].startTime / 1000);
  new PerformanceObserver(list => seen(list.getEntriesByName('first-contentful-paint')))
    .observe({type: 'paint', buffered: true});
})"""


def measure_paint(run: Path, cache: Path, *, step: int) -> list[tuple[str, float]]:
    """(view, seconds): the first contentful paint, and until what was asked for is there. Every
    view in a browser without a cache; the first one from a server that knows nothing yet."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("no Chromium with playwright here: paint is not measured (`make browser`)")
        return []
    views = {
        "/#/": ("the list of runs", "table.runs tbody tr"),
        "/#/run/many": ("the run with its curves", ".chart canvas"),
        f"/#/run/many/episodes?split=step&step={step}": ("a step", "table.episodes tbody tr"),
        f"/#/run/many/step/{step}/0": ("an episode", "section.turn"),
    }
    found: list[tuple[str, float]] = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        server = Server(run, cache)
        try:
            for address, (words, part) in views.items():
                page = browser.new_context().new_page()
                start = time.perf_counter()
                page.goto(server.url + address, wait_until="commit")
                page.locator(part).first.wait_for()
                seconds = time.perf_counter() - start
                found.append((f"first paint, {words}", float(page.evaluate(PAINTED))))
                found.append((f"  and {words} is there", seconds))
                page.context.close()
        finally:
            server.stop()
            browser.close()
    return found


def measure(run: Path, cache: Path, *, step: int, episodes: int) -> list[tuple[str, float]]:
    """(question, seconds until its answer)."""
    server = Server(run, cache)
    found: list[tuple[str, float]] = []
    base = "/api/run/many"
    try:

        def ask(words: str, path: str) -> Any:
            seconds, answer = server.get(path)
            found.append((words, seconds))
            return answer

        found.append(("command to listening", time.perf_counter() - server.started))
        ask("GET / (the page)", "/")
        ask("GET /api/runs, first", "/api/runs")
        ask("GET /api/run/RUN, first", base)
        ask("GET metrics, all", f"{base}/metrics")
        ask("GET episodes of one step, nothing indexed", f"{base}/episodes?split=step&step={step}")
        ask("GET an episode", f"{base}/episode?split=step&step={step}&row=0")
        found.append(("command to all of these", time.perf_counter() - server.started))
        print(f"{'memory while indexing (now, most), MB':<45} %.0f, %.0f" % server.memory())
        while True:
            answer = server.get(f"{base}/episodes?split=step&step=all&limit=1")[1]
            if answer["indexed"]["files"] == answer["indexed"]["of"]:
                break
            time.sleep(1.0)
        found.append(("command to all episodes indexed", time.perf_counter() - server.started))
        ask("GET episodes of all steps", f"{base}/episodes?split=step&step=all")
        late = max(0, episodes - 100)
        ask("  the last page, by reward", f"{base}/episodes?step=all&sort=reward&offset={late}")
        asked = quote(NEEDLE.upper())
        answer = ask(
            "GET text search over all, one match", f"{base}/episodes?step=all&text={asked}"
        )
        assert answer["total"] == 1, answer["total"]
        answer = ask("GET text search over all, most match", f"{base}/episodes?step=all&text=goal")
        print(f"episodes: {server.get(f'{base}/episodes?step=all&limit=1')[1]['total']}")
        print(f"{'memory at the end (now, most), MB':<45} %.0f, %.0f" % server.memory())
    finally:
        server.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        path = folder / "many"
        if not path.is_dir():
            made = {"episodes": asked.episodes, "steps": asked.steps, "tokens": asked.tokens}
            make_run(folder, **made)
        size = sum(file.stat().st_size for file in (path / "episodes").iterdir())
        print(f"{len(list((path / 'episodes').iterdir()))} files, {size / 1e6:.0f} MB of episodes")
        cache = Path(temporary) / "cache"
        files = sorted((path / "episodes").iterdir())
        step = len(files) // 2
        for words, seconds in (
            *measure(path, cache, step=step, episodes=asked.episodes),
            *measure_paint(path, Path(temporary) / "other", step=step),
        ):
            print(f"{words:<45} {seconds:8.3f} s")
        stored = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
        print(f"index on disk: {stored / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
