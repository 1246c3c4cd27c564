"""Tokens per second and MFU of one update on one GPU, ours against a TRL GRPO step on the same ids.

    python benchmarks/gpu/train_step.py --model DIR [--gguf FILE] [--rows 256] [--tokens 32768
    65536]
                                        [--trl-rows 8 16 32 64] [--layers plain compiled] [--json
                                        FILE]
    python benchmarks/gpu/train_step.py --device cpu --tiny

Both run GRPO's clipped loss over the same multi-turn rows: forward, backward, gradient clipping,
AdamW (fused on CUDA). Ours runs in bfloat16 with float32 masters, packed, with its layers as they
are and compiled (train.compile); TRL in float32 weights under bfloat16 autocast (its mixed
precision) and, besides, with bfloat16 weights and no masters. Each takes the fastest of the
micro-batch sizes given; a size that does not fit is left out. Tokens are real ones, padding not
counted. MFU counts the work that the batch needs and no more: 6 FLOPs per token and weight of the
trunk, the projection onto the vocabulary at reply tokens only, causal attention; over --peak.
Before anything is timed, the two gradients are compared. Without TRL ours runs alone.
"""

import argparse
import gc
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from train_step import Step, best, make_batch, make_model, our_step, trl_step

from turnwise.config.schema import ModelConfig
from turnwise.data.batch import Batch
from turnwise.models.policy import load_model
from turnwise.models.scoring import head_of, trunk_of

PEERS = ("turnwise", "trl")


def flops(model: Any, batch: Batch) -> float:
    """What one update over the batch needs: forward and backward, nothing computed twice."""
    config = model.config
    embedded = model.get_input_embeddings().weight.numel()
    trunk = sum(parameter.numel() for parameter in trunk_of(model).parameters()) - embedded
    head = head_of(model).weight.numel()
    width = config.num_attention_heads * (
        vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
    )
    attention = (
        6.0 * config.num_hidden_layers * width * float(batch.lengths.double().square().sum())
    )
    return (
        6.0 * trunk * batch.num_tokens + 6.0 * head * float(batch.response_mask.sum()) + attention
    )


def fastest(
    make: Callable[[int], Step], sizes: list[int], *, runs: int, device: str
) -> tuple[float, int, int]:
    """(seconds, micro-batch size, most bytes of device memory in use) of the fastest size that
    fits."""
    found: list[tuple[float, int, int]] = []
    for size in sizes:
        step = None
        try:
            step = make(size)
            seconds = best(step.update, runs=runs, device=device)
            found.append(
                (seconds, size, 0 if device == "cpu" else torch.cuda.max_memory_allocated())
            )
        except torch.OutOfMemoryError:
            print(f"micro-batches of {size} do not fit", flush=True)
        del step
        _clean(device)
    if not found:
        raise SystemExit("no micro-batch size fits; give smaller ones")
    return min(found)


def measure(
    load: Callable[[], Any], options: argparse.Namespace, *, vocabulary: int
) -> dict[str, Any]:
    """Both engines on the same batch, gradients compared first."""
    device, dtype = options.device, options.dtype
    batch = make_batch(
        rows=options.rows,
        prompt=options.prompt,
        turns=options.turns,
        vocabulary=vocabulary,
        said_tokens=tuple(options.said),
        seen_tokens=tuple(options.seen),
    )
    work = flops(load(), batch)

    def figures(engine: str, seconds: float, size: int, memory: int) -> dict[str, Any]:
        row: dict[str, Any] = {"engine": engine, "micro_batch": size, "seconds": seconds}
        row |= {"tokens_per_second": batch.num_tokens / seconds, "tflops": work / seconds / 1e12}
        row["mfu"] = None if options.peak is None else row["tflops"] / options.peak
        if device != "cpu":
            row["memory_gib"] = memory / 2**30
        print(json.dumps(row), flush=True)
        return row

    rows: list[dict[str, Any]] = []
    step = our_step(
        load(), batch, tokens=options.tokens[0], device=device, dtype=dtype, packing=options.packing
    )
    step.gradient()
    ours = step.flat_gradient()
    del step
    _clean(device)
    for layers in options.layers:

        def ours_with(tokens: int, layers: str = layers) -> Step:
            return our_step(
                load(),
                batch,
                tokens=tokens,
                device=device,
                dtype=dtype,
                packing=options.packing,
                compile=layers == "compiled",
            )

        found = fastest(ours_with, options.tokens, runs=options.runs, device=device)
        rows.append(figures(f"turnwise {dtype}, layers {layers}", *found))
    result: dict[str, Any] = {
        "rows_in_batch": batch.num_rows,
        "tokens": batch.num_tokens,
        "padded_tokens": batch.input_ids.numel(),
        "reply_tokens": int(batch.response_mask.sum()),
        "tflop": work / 1e12,
        "rows": rows,
    }
    if importlib.util.find_spec("trl") is None:
        return {**result, "trl": "not installed; turnwise ran alone"}
    half = dtype == "bfloat16"
    for name, weights, autocast in (
        (
            "trl, float32 weights" + (", bfloat16 autocast" if half else ""),
            torch.float32,
            torch.bfloat16 if half else None,
        ),
        *([("trl, bfloat16 weights", torch.bfloat16, None)] if half else []),
    ):
        with tempfile.TemporaryDirectory() as folder:

            def make(
                count: int, weights: Any = weights, autocast: Any = autocast, folder: str = folder
            ) -> Step:
                model = load().to(device=device, dtype=weights)
                return trl_step(
                    model,
                    batch,
                    prompt=options.prompt,
                    micro_rows=count,
                    device=device,
                    folder=folder,
                    autocast=autocast,
                )

            if weights == torch.float32:
                step = make(options.trl_rows[0])
                step.gradient()
                theirs = step.flat_gradient()
                result["gradient_difference"] = float((ours - theirs).norm() / theirs.norm())
                del step, theirs
                _clean(device)
            rows.append(
                figures(name, *fastest(make, options.trl_rows, runs=options.runs, device=device))
            )
    speed = {
        kind: max(r["tokens_per_second"] for r in rows if r["engine"].startswith(kind))
        for kind in PEERS
    }
    result["ratio"] = speed["turnwise"] / speed["trl"]
    return result


def show(result: dict[str, Any]) -> None:
    print(
        f"{result['rows_in_batch']} rows, {result['tokens']} tokens ({result['padded_tokens']} "
        "padded), "
        f"{result['reply_tokens']} of them replies"
    )
    print(f"{'engine':44s} {'micro':>8s} {'seconds':>9s} {'tokens/s':>10s} {'MFU':>7s} {'GiB':>6s}")
    for row in result["rows"]:
        mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        memory = f"{row['memory_gib']:.1f}" if "memory_gib" in row else ""
        print(
            f"{row['engine']:44s} {row['micro_batch']:8d} {row['seconds']:9.3f} "
            f"{row['tokens_per_second']:10.0f} "
            f"{mfu:>7s} {memory:>6s}"
        )
    if "ratio" in result:
        print(
            f"{result['ratio']:.2f} times TRL's faster one; gradients differ by "
            f"{result['gradient_difference']:.2e}"
        )
    else:
        print(result["trl"])


def _clean(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--gguf")
    parser.add_argument("--tiny", action="store_true", help="a random model and a small batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 on the CPU")
    parser.add_argument("--packing", choices=["auto", "true", "false"], default="auto")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=120)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--said", type=int, nargs=2, default=[16, 65], metavar=("LOW", "HIGH"))
    parser.add_argument("--seen", type=int, nargs=2, default=[30, 61], metavar=("LOW", "HIGH"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--trl-rows", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument(
        "--layers",
        choices=["plain", "compiled"],
        nargs="+",
        help="default: both on CUDA, else plain",
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--peak", type=float, help="TFLOP/s of the device; default: 989 (H100, H200) on CUDA"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.packing = {"auto": "auto", "true": True, "false": False}[options.packing]
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.layers = options.layers or (
        ["plain"] if options.device == "cpu" else ["plain", "compiled"]
    )
    options.peak = options.peak or (None if options.device == "cpu" else 989.0)
    if options.tiny:
        options.rows, options.prompt, options.tokens, options.trl_rows, options.runs = (
            8,
            12,
            [512],
            [4],
            1,
        )
        options.said, options.seen = [4, 9], [4, 9]
        vocabulary = 512
        load = lambda: make_model(vocabulary=vocabulary, width=32, layers=1)  # noqa: E731
    elif options.model is None:
        parser.error("give --model DIR, or --tiny")
    else:
        path = ModelConfig(path=options.model, gguf_file=options.gguf)
        # Read once: dequantising a GGUF file takes longer than the steps that are timed.
        first = load_model(path)
        vocabulary = first.get_input_embeddings().weight.shape[0]
        import copy

        load = lambda: copy.deepcopy(first)  # noqa: E731
    result = measure(load, options, vocabulary=vocabulary)
    if options.device != "cpu":
        result["gpu"] = torch.cuda.get_device_name()
    result["torch"] = torch.__version__
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
