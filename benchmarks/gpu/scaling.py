"""How the cost of a turn changes with the number of turns and of slots. It should not grow with
either.

    python benchmarks/gpu/scaling.py --model DIR [--gguf FILE] [--turns 1 2 4 8 16 32] [--slots 16
    64 256 1024]
                                     [--compile] [--json FILE]
    python benchmarks/gpu/scaling.py --device cpu --tiny

Rollouts of FrozenLake with --tokens generated tokens per turn, as in rollout.py. The first sweep
plays ever longer episodes with --at-slots of them at once: a session keeps its keys and values, so
a turn prefills its own observation and nothing else, and the microseconds per turn stay level (but
for attention over the longer context). The second sweep plays --at-turns turns with more and more
episodes at once: a turn gets cheaper until the device is full. Every figure is the best of
--repeats rollouts after one that warms up.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from rollout import config_for

from turnwise.generate.hf import GeneratorStats, HFGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_model, tiny_tokenizer


def make_generator(
    model: Any, tokenizer: Any, *, slots: int, options: argparse.Namespace
) -> HFGenerator:
    return HFGenerator(
        model,
        tokenizer,
        slots=slots,
        max_context=options.context,
        end_of_turn=False,
        compile=options.compile,
    )


def play(
    generator: HFGenerator,
    tokenizer: Any,
    *,
    episodes: int,
    turns: int,
    options: argparse.Namespace,
) -> Any:
    """Figures of the fastest rollout of so many episodes of so many turns."""
    config = config_for(episodes, turns=turns, tokens=options.tokens, context=options.context)
    proxy = AgentProxy(config, generator, tokenizer)
    best: dict[str, Any] = {}
    for step in range(1 + options.repeats):
        generator.stats = GeneratorStats()
        _wait(options.device)
        started = time.perf_counter()
        result = proxy.play(step)
        _wait(options.device)
        seconds = time.perf_counter() - started
        played = sum(len(episode.turns) for episode in result.episodes)
        figures = {
            "turns": turns,
            "slots": episodes,
            "turns_played": played,
            "seconds": seconds,
            "microseconds_per_turn": 1e6 * seconds / played,
            "prefilled_tokens_per_turn": generator.stats.prefilled_tokens / played,
            "tokens_per_second": result.num_tokens / seconds,
        }
        if step and (not best or seconds < best["seconds"]):
            best = figures
    proxy.close()
    return best


def table(rows: list[dict[str, Any]], by: str) -> None:
    first = rows[0]["microseconds_per_turn"]
    print(
        f"{'turns':>6s} {'slots':>6s} {'us/turn':>10s} {'of first':>9s} {'prefilled/turn':>15s} "
        f"{'tokens/s':>10s}"
    )
    for row in rows:
        print(
            f"{row['turns']:6d} {row['slots']:6d} {row['microseconds_per_turn']:10.0f} "
            f"{row['microseconds_per_turn'] / first:9.2f} {row['prefilled_tokens_per_turn']:15.1f} "
            f"{row['tokens_per_second']:10.0f}"
        )
    print(f"(by {by})")


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    if options.tiny:
        return tiny_model().to(options.device), tiny_tokenizer()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, gguf_file=options.gguf, dtype=dtype)
    return model.to(options.device).eval(), AutoTokenizer.from_pretrained(
        options.model, gguf_file=options.gguf
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--gguf")
    parser.add_argument(
        "--tiny", action="store_true", help="a random model and a few short episodes"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--at-slots", type=int, default=256)
    parser.add_argument("--at-turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=6144)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.turns, options.slots, options.at_slots, options.at_turns = [1, 2], [8], 8, 2
        options.tokens, options.context, options.repeats = 4, 4096, 1
    elif options.model is None:
        parser.error("give --model DIR, or --tiny")
    model, tokenizer = load(options)
    result: dict[str, Any] = {"torch": torch.__version__, "by_turns": [], "by_slots": []}
    generator = make_generator(model, tokenizer, slots=options.at_slots, options=options)
    for turns in options.turns:
        row = play(generator, tokenizer, episodes=options.at_slots, turns=turns, options=options)
        result["by_turns"].append(row)
        print(json.dumps(row), flush=True)
    generator.free_cache()
    options.context = min(options.context, 2048) if not options.tiny else options.context
    for slots in options.slots:
        generator = make_generator(model, tokenizer, slots=slots, options=options)
        row = play(generator, tokenizer, episodes=slots, turns=options.at_turns, options=options)
        result["by_slots"].append(row)
        print(json.dumps(row), flush=True)
        generator.free_cache()
    table(result["by_turns"], "turns")
    table(result["by_slots"], "slots")
    if options.device != "cpu":
        result["gpu"] = torch.cuda.get_device_name()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
