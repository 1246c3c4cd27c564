"""Multi-turn generation with the session's cache kept, against prefilling the whole conversation
every turn.

Both sides run the same engine on the same small CPU model with the same prompts, and must say the
same ids before anything is timed. Prints a table and one JSON object.

    python benchmarks/generation.py            # 10 turns, 16 sessions
    python benchmarks/generation.py --quick    # a few seconds
"""

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import dataclass

import torch
import transformers

from turnwise.generate.base import Sampling, Session
from turnwise.generate.hf import HFGenerator
from turnwise.testing.tiny import tiny_model, tiny_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    sessions: int
    turns: int
    observation: int
    """Given ids per turn."""
    reply: int
    """Sampled ids per turn."""
    hidden_size: int
    num_layers: int
    repeats: int
    """Timed runs per side, interleaved; the fastest counts."""


FULL = Setting(
    sessions=16, turns=10, observation=60, reply=8, hidden_size=128, num_layers=4, repeats=3
)
QUICK = Setting(
    sessions=4, turns=5, observation=24, reply=3, hidden_size=64, num_layers=2, repeats=1
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    ids: list[list[list[int]]]  # [session][turn][id]
    prefilled: list[int]
    """Prefilled ids per turn, over all sessions."""
    seconds: list[float]
    """Wall time per turn."""
    cpu_seconds: float


def observation(setting: Setting, session: int, turn: int) -> list[int]:
    return [(37 * session + 11 * turn + 5 * i) % 256 for i in range(setting.observation)]


async def play(generator: HFGenerator, setting: Setting, *, keep: bool) -> Result:
    """Plays all sessions turn by turn. Without `keep`, a turn opens a new session with the whole
    conversation."""
    sampling = Sampling(max_tokens=setting.reply, temperature=0.0)
    held: list[list[int]] = [[] for _ in range(setting.sessions)]
    ids: list[list[list[int]]] = [[] for _ in range(setting.sessions)]
    prefilled: list[int] = []
    seconds: list[float] = []
    cpu = time.process_time()

    async def turn_of(index: int, turn: int) -> None:
        new = observation(setting, index, turn)
        session = Session(key=f"{index}" if keep else f"{index}/{turn}", seed=index)
        completion = await generator.generate(session, new if keep else held[index] + new, sampling)
        held[index] += [*new, *completion.ids]
        ids[index].append(list(completion.ids))
        if not keep or turn == setting.turns - 1:
            await generator.release(session)

    for turn in range(setting.turns):
        before, start = generator.stats.prefilled_tokens, time.perf_counter()
        await asyncio.gather(*(turn_of(index, turn) for index in range(setting.sessions)))
        seconds.append(time.perf_counter() - start)
        prefilled.append(generator.stats.prefilled_tokens - before)
    return Result(
        ids=ids, prefilled=prefilled, seconds=seconds, cpu_seconds=time.process_time() - cpu
    )


def measure(setting: Setting) -> dict[str, object]:
    """The comparison as JSON. Raises if the two sides do not say the same."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = tiny_model(hidden_size=setting.hidden_size, num_layers=setting.num_layers)
    context = setting.turns * (setting.observation + setting.reply)
    sides: dict[bool, list[Result]] = {True: [], False: []}
    for repeat in range(setting.repeats + 1):  # the first is not timed
        for keep in (True, False):
            generator = HFGenerator(
                model, tiny_tokenizer(), slots=setting.sessions, max_context=context
            )
            generator.stop_ids = frozenset()
            result = asyncio.run(play(generator, setting, keep=keep))
            if repeat:
                sides[keep].append(result)
    kept, anew = (
        min(sides[keep], key=lambda result: sum(result.seconds)) for keep in (True, False)
    )
    if kept.ids != anew.ids:
        raise AssertionError("with and without the kept cache the replies must be the same ids")
    generated = setting.sessions * setting.turns * setting.reply
    return {
        "benchmark": "generation",
        "setting": {name: getattr(setting, name) for name in Setting.__slots__},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "kept": {
            "prefilled": kept.prefilled,
            "seconds": kept.seconds,
            "cpu_seconds": kept.cpu_seconds,
        },
        "anew": {
            "prefilled": anew.prefilled,
            "seconds": anew.seconds,
            "cpu_seconds": anew.cpu_seconds,
        },
        "tokens_per_second": {
            "kept": generated / sum(kept.seconds),
            "anew": generated / sum(anew.seconds),
        },
        "speedup": sum(anew.seconds) / sum(kept.seconds),
        "cpu_speedup": min(r.cpu_seconds for r in sides[False])
        / min(r.cpu_seconds for r in sides[True]),
        "last_turn_speedup": anew.seconds[-1] / kept.seconds[-1],
    }


def table(result: dict[str, object]) -> str:
    kept, anew = result["kept"], result["anew"]
    assert isinstance(kept, dict)
    assert isinstance(anew, dict)
    lines = ["turn   prefilled kept   anew     ms kept     anew"]
    for turn, row in enumerate(
        zip(kept["prefilled"], anew["prefilled"], kept["seconds"], anew["seconds"], strict=True)
    ):
        lines.append(
            f"{turn + 1:4d} {row[0]:16d} {row[1]:6d} {1e3 * row[2]:11.1f} {1e3 * row[3]:8.1f}"
        )
    sums = [sum(part[name]) for name in ("prefilled", "seconds") for part in (kept, anew)]
    lines.append(f" all {sums[0]:16d} {sums[1]:6d} {1e3 * sums[2]:11.1f} {1e3 * sums[3]:8.1f}")
    lines.append(
        f"speed-up {result['speedup']:.2f} by wall clock, {result['cpu_speedup']:.2f} by CPU time"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a small setting, to see that it runs")
    result = measure(QUICK if parser.parse_args().quick else FULL)
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
