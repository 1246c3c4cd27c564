"""Multi-turn generation on one GPU: our in-process engine against transformers `generate`, same
prompts and lengths.

    python benchmarks/gpu/rollout.py --model DIR [--gguf FILE] [--episodes 256 1024] [--turns 5]
    [--tokens 64]

Every reply has exactly --tokens tokens, log-probs included, and the environment is FrozenLake.
`generate` gets the conversations that our rollout played, whole, turn after turn in one padded
batch, as TRL does without vLLM. Tokens per second are generated tokens over the wall time of the
whole rollout, the environment's and the tokenizer's included for ours and left out for the peers;
the best of --repeats counts, and the median is told.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise.config.schema import Config, EnvConfig, GroupsConfig, RolloutConfig, TrainConfig
from turnwise.generate.hf import GeneratorStats, HFGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.types import Episode


def config_for(episodes: int, *, turns: int, tokens: int, context: int) -> Config:
    groups = GroupsConfig(env_groups=episodes // 8, group_size=8)
    rollout = RolloutConfig(
        train=groups,
        max_response_tokens=tokens,
        max_context=context,
        isolation="inline",
        slots=episodes,
    )
    env = EnvConfig(name="frozen_lake", options={"size": 4})
    return Config(env=env, rollout=rollout, train=TrainConfig(max_turn=turns))


def ours(
    model: Any, tokenizer: Any, episodes: int, options: argparse.Namespace
) -> tuple[dict[str, Any], list[Episode]]:
    """Our rollout's figures and the episodes it played."""
    context = options.context
    config = config_for(episodes, turns=options.turns, tokens=options.tokens, context=context)
    generator = HFGenerator(
        model,
        tokenizer,
        slots=episodes,
        max_context=context,
        end_of_turn=False,
        compile=options.compile,
        block_steps=options.block_steps,
    )
    proxy = AgentProxy(config, generator, tokenizer)
    started = time.perf_counter()
    proxy.play(0)
    warmup = time.perf_counter() - started
    best: dict[str, Any] = {}
    played: list[Episode] = []
    taken: list[float] = []
    for step in range(1, 1 + options.repeats):
        generator.stats = GeneratorStats()
        torch.cuda.synchronize()
        started, worked = time.perf_counter(), time.thread_time()
        result = proxy.play(step)
        seconds, worked = time.perf_counter() - started, time.thread_time() - worked
        taken.append(seconds)
        turns = sum(len(e.turns) for e in result.episodes)
        figures = {
            "engine": "turnwise",
            "episodes": episodes,
            "tokens": result.num_tokens,
            "seconds": seconds,
            "tokens_per_second": result.num_tokens / seconds,
            "episodes_per_second": episodes / seconds,
            "turns": turns,
            "host_seconds": worked,
            "environment_seconds": sum(t.env_seconds for e in result.episodes for t in e.turns),
            "prefill_seconds": generator.stats.prefill_seconds,
            "decode_seconds": generator.stats.decode_seconds,
            "idle_seconds": max(
                seconds - generator.stats.prefill_seconds - generator.stats.decode_seconds, 0.0
            ),
            "shared_tokens": generator.stats.shared_tokens,
            "prefilled_tokens": generator.stats.prefilled_tokens,
            "decode_steps": generator.stats.decode_steps,
            "warmup_seconds": warmup,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        if not best or figures["seconds"] < best["seconds"]:
            best, played = figures, list(result.episodes)
    proxy.close()
    generator.free_cache()
    best["median_seconds"] = statistics.median(taken)
    return best, played


def contexts(episodes: list[Episode], turn: int) -> list[list[int]]:
    """What the model had read before its reply of this turn, of the episodes that got so far."""
    found: list[list[int]] = []
    for episode in episodes:
        if len(episode.turns) > turn:
            held: list[int] = []
            for index, played in enumerate(episode.turns[: turn + 1]):
                held += played.prompt_ids
                if index < turn:
                    held += played.completion.ids
            found.append(held)
    return found


def with_generate(
    model: Any, tokenizer: Any, episodes: list[Episode], options: argparse.Namespace
) -> dict[str, Any]:
    """transformers `generate` over the same conversations, prefilled whole at every turn."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def run(turn: int) -> int:
        rows = contexts(episodes, turn)
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows]).cuda()
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]).cuda()
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=options.tokens,
            min_new_tokens=options.tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=pad,
        )
        return len(rows) * options.tokens

    run(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = sum(run(turn) for turn in range(options.turns))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "engine": "transformers generate",
        "episodes": len(episodes),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def with_vllm(
    directory: str, tokenizer: Any, episodes: list[Episode], options: argparse.Namespace
) -> dict[str, Any]:
    """vLLM with prefix caching and log-probs over the same conversations."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        directory,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.5,
        max_model_len=options.context,
    )
    sampling = SamplingParams(
        max_tokens=options.tokens,
        min_tokens=options.tokens,
        temperature=1.0,
        logprobs=0,
        ignore_eos=True,
    )
    turns = [
        [{"prompt_token_ids": row} for row in contexts(episodes, turn)]
        for turn in range(options.turns)
    ]
    tokens, seconds = 0, float("inf")
    for _ in range(1 + options.repeats):  # the first one warms up
        llm.reset_prefix_cache()
        started = time.perf_counter()
        replies = [llm.generate(rows, sampling, use_tqdm=False) for rows in turns]
        tokens = sum(len(reply.outputs[0].token_ids) for turn in replies for reply in turn)
        seconds = min(seconds, time.perf_counter() - started)
    return {
        "engine": "vllm",
        "episodes": len(episodes),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--episodes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peers", nargs="*", default=["generate"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, gguf_file=options.gguf, dtype=torch.bfloat16
    ).cuda()
    tokenizer = AutoTokenizer.from_pretrained(options.model, gguf_file=options.gguf)
    rows: list[dict[str, Any]] = []
    for index, episodes in enumerate(options.episodes):
        figures, played = ours(model.eval(), tokenizer, episodes, options)
        rows.append(figures)
        print(json.dumps(figures), flush=True)
        if index == 0 and "generate" in options.peers:
            rows.append(with_generate(model, tokenizer, played, options))
            print(json.dumps(rows[-1]), flush=True)
        if index == 0 and "vllm" in options.peers:
            try:
                rows.append(with_vllm(options.model, tokenizer, played, options))
                print(json.dumps(rows[-1]), flush=True)
            except ImportError as error:
                print(f"vllm is not installed here: {error}", flush=True)
    print(f"{'engine':24s} {'episodes':>9s} {'tokens':>9s} {'seconds':>9s} {'tokens/s':>10s}")
    for row in rows:
        print(
            f"{row['engine']:24s} {row['episodes']:9d} {row['tokens']:9d} {row['seconds']:9.2f} "
            f"{row['tokens_per_second']:10.0f}"
        )
    print(
        "share of the wall time; the host works, on environments among others, while the device "
        "works or idles"
    )
    for row in rows:
        if "decode_seconds" in row:
            parts = ("decode", "prefill", "idle", "host", "environment")
            shares = ", ".join(
                f"{part} {100 * row[f'{part}_seconds'] / row['seconds']:.0f} %" for part in parts
            )
            print(f"{row['engine']:24s} {row['episodes']:9d} {shares}")
            print(f"{'':24s} {'median':>9s} {row['tokens'] / row['median_seconds']:.0f} tokens/s")
    if options.json:
        options.json.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
