"""Where the time of a rollout goes, for any recipe: the device's prefill, decoding and idling, the
blocks that were launched, and what the host did meanwhile.

    python benchmarks/gpu/turn_profile.py --model DIR [--gguf FILE] [--recipe qwen_1_5b_alfworld]
                                          [--repeats 3] [--set KEY=VALUE ...] [--json FILE]
    python benchmarks/gpu/turn_profile.py --device cpu --tiny

Plays the recipe's training episodes with --model, which should be an imitated one (stages.py
--keep), since episodes of an untrained one have every turn that there is. After a rollout that
warms up, --repeats are measured. A thread looks at the stacks of the others every --every-ms: a
function's share is that of the looks in which it was the innermost one of turnwise on the stack of
a thread. Threads that wait for work are left out.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learn import machine
from stages import TINY, given_model

PACKAGE = "turnwise/"
WAITING = ("procs/threads.py:_run", "procs/progress.py:_arm")
MOST_SHOWN = 25


class Looks(threading.Thread):
    """Counts in which functions the threads of this process are."""

    def __init__(self, every_s: float) -> None:
        super().__init__(name="looks", daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self.count = 0
        self.found: Counter[tuple[str, str, str]] = Counter()
        """(thread, innermost function of turnwise, innermost function) -> looks."""

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self.count += 1
            for ident, frame in sys._current_frames().items():
                ours = None if ident == self.ident else innermost(frame, PACKAGE)
                if ours is not None and ours not in WAITING:
                    self.found[names.get(ident, "?"), ours, innermost(frame, "") or "?"] += 1

    def end(self) -> None:
        self._over.set()
        self.join()


def innermost(frame: FrameType | None, within: str) -> str | None:
    """FILE:FUNCTION of the innermost frame whose file's path has this part."""
    while frame is not None:
        file = frame.f_code.co_filename
        if within in file:
            short = file.rpartition(PACKAGE)[2] if PACKAGE in file else Path(file).name
            return f"{short}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None


class Blocks:
    """Notes every block that the driver launches: when, with how many requests that begin, how many
    decode steps, and the host's seconds."""

    def __init__(self, driver: Any) -> None:
        self.rows: list[dict[str, float]] = []
        self._launch, self._driver = driver.launch, driver
        driver.launch = self._noted

    def _noted(self, waiting: Sequence[Any], *, steps: int | None = None) -> None:
        began, before = time.perf_counter(), self._driver.decode_steps
        self._launch(waiting, steps=steps)
        self.rows.append(
            {
                "at": began,
                "seconds": time.perf_counter() - began,
                "begin": len(waiting),
                "live": len(self._driver._live),
                "steps": self._driver.decode_steps - before,
            }
        )


def play(proxy: Any, generator: Any, step: int, *, blocks: Blocks | None) -> dict[str, Any]:
    """Figures of one rollout."""
    from turnwise.generate.requests import GeneratorStats

    generator.stats = GeneratorStats()
    if blocks is not None:
        blocks.rows.clear()
    started, worked = time.perf_counter(), time.thread_time()
    result = proxy.play(step)
    seconds, worked = time.perf_counter() - started, time.thread_time() - worked
    turns = [turn for episode in result.episodes for turn in episode.turns]
    most = max(len(episode.turns) for episode in result.episodes)
    waits = sorted(turn.generate_seconds for turn in turns)
    stats = generator.stats
    found: dict[str, Any] = {
        "seconds": seconds,
        "episodes": len(result.episodes),
        "turns": len(turns),
        "longest": most,
        "seconds_per_round": seconds / most,
        "generated_tokens": result.num_tokens,
        "tokens_per_reply": result.num_tokens / len(turns),
        "prefilled_tokens": stats.prefilled_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "idle_seconds": seconds - stats.prefill_seconds - stats.decode_seconds,
        "decode_steps": stats.decode_steps,
        "main_thread_seconds": worked,
        "environment_seconds": sum(turn.env_seconds for turn in turns),
        "reply_seconds_median": waits[len(waits) // 2],
        "reply_seconds_p95": waits[int(0.95 * (len(waits) - 1))],
    }
    if blocks is not None and blocks.rows:
        rows = blocks.rows
        beginning = [row for row in rows if row["begin"]]
        found |= {
            "blocks": len(rows),
            "blocks_with_prompts": len(beginning),
            "prompts_per_such_block": len(turns) / max(len(beginning), 1),
            "live_per_block": sum(row["live"] for row in rows) / len(rows),
            "steps_per_block": sum(row["steps"] for row in rows) / len(rows),
            "launch_seconds": sum(row["seconds"] for row in rows),
        }
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", help="the model's file in its folder, where it is a GGUF")
    parser.add_argument("--recipe", default="qwen_1_5b_alfworld")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every-ms", type=float, default=2.0)
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if options.tiny == (options.model is not None):
        parser.error("give --model DIR, or --tiny")
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        model = given_model(options, Path(scratch))
        found = profile(model, options)
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **found}, indent=1))
    return 0


def profile(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    from turnwise.config import run_config
    from turnwise.generate.hf import HFGenerator
    from turnwise.models.policy import Precision, cast_parameters, load_model, load_tokenizer
    from turnwise.rollout.proxy import AgentProxy

    words = [f"model.path={model}", f"train.device={options.device}", "sft.source=[]"]
    config = run_config(
        options.recipe, [*words, *(TINY if options.tiny else ()), *options.settings]
    )
    precision = Precision.choose(config.model.dtype, device=config.train.device)
    network: Any = load_model(config.model).to(device=precision.device)
    tokenizer = load_tokenizer(config.model)
    generator = HFGenerator(
        cast_parameters(network, precision.dtype).eval(),
        tokenizer,
        slots=config.rollout.slots,
        max_context=config.rollout.max_context,
        engine="blocks",
        compile=config.train.compile,
    )
    assert generator._blocks is not None
    blocks, proxy = Blocks(generator._blocks), AgentProxy(config, generator, tokenizer)
    warm = play(proxy, generator, 0, blocks=blocks)
    looks = Looks(options.every_ms / 1000.0)
    looks.start()
    rows = [play(proxy, generator, step, blocks=blocks) for step in range(1, 1 + options.repeats)]
    looks.end()
    proxy.close()
    shares = [
        {"thread": thread, "ours": ours, "innermost": inner, "share": count / looks.count}
        for (thread, ours, inner), count in looks.found.most_common(200)
    ]
    return {"command": sys.argv, "warm_up": warm, "rollouts": rows, "looks": shares}


def show(found: dict[str, Any]) -> None:
    for name in found["rollouts"][0]:
        values = " ".join(f"{row.get(name, 0):>10.4g}" for row in found["rollouts"])
        print(f"{name:26} {values}")
    print("share of the time, by thread, function of turnwise, innermost function:")
    for look in found["looks"][:MOST_SHOWN]:
        print(f"{look['share']:6.1%}  {look['thread']:16.16}  {look['ours']}  {look['innermost']}")


if __name__ == "__main__":
    raise SystemExit(main())
