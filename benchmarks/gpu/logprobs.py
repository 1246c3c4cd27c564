"""Log-probs from hidden states, forward and backward: ours against liger-kernel's and against plain
logits.

    python benchmarks/gpu/logprobs.py [--positions 16384] [--json FILE]
    python benchmarks/gpu/logprobs.py --device cpu --tiny

Ours gives log-prob and entropy of every position and the gradients of states and projection, a
chunk of logits at a time. Liger's fused projection and cross-entropy gives log-probs alone
(reduction "none"), so an entropy bonus or a report of the entropy would need a second pass there.
Sizes are those of SmolLM2-135M and Qwen2.5-1.5B, bfloat16. Gradients are compared with float64's
before anything is timed. Without liger-kernel ours runs against plain logits.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.models.scoring import chunk_elements, score_states

SIZES = {"SmolLM2-135M": (576, 49152), "Qwen2.5-1.5B": (1536, 151936)}
Scores = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def ours(head: nn.Linear, states: Tensor, targets: Tensor) -> Tensor:
    size = chunk_elements(states.device)
    return score_states(head, states, targets, temperature=1.0, softcap=None, chunk_elements=size)[
        0
    ]


def plain(head: nn.Linear, states: Tensor, targets: Tensor) -> Tensor:
    logits = head(states)
    return torch.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1
    ).gather(1, targets[:, None])[:, 0]


def liger(head: nn.Linear, states: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    loss: Any = LigerFusedLinearCrossEntropyLoss(reduction="none")
    return -loss(head.weight, states, targets)


def gradients(
    scores: Scores, head: nn.Linear, states: Tensor, targets: Tensor, weights: Tensor
) -> list[Tensor]:
    """Of the states and of the projection, where every position has a weight of its own, as
    advantages give it."""
    states.grad = head.weight.grad = None
    (scores(head, states, targets) * weights).sum().backward()
    assert states.grad is not None
    assert head.weight.grad is not None
    return [states.grad, head.weight.grad]


def measure(name: str, size: tuple[int, int], options: argparse.Namespace) -> list[dict[str, Any]]:
    width, vocabulary = size
    device, on_gpu = options.device, options.device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
    states = torch.randn(options.positions, width, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(vocabulary, (options.positions,), device=device)
    weights = torch.randn(options.positions, device=device)
    few = slice(0, min(options.positions, 256))
    exact = nn.Linear(width, vocabulary, bias=False, device=device, dtype=torch.float64)
    exact.weight.data.copy_(head.weight)
    small = states.detach()[few].double().requires_grad_()
    expected = gradients(plain, exact, small, targets[few], weights[few].double())
    peers: dict[str, Scores] = {"turnwise, entropy included": ours, "plain logits": plain}
    if on_gpu and importlib.util.find_spec("liger_kernel") is not None:
        peers["liger-kernel"] = liger
    rows: list[dict[str, Any]] = []
    for engine, scores in peers.items():
        row: dict[str, Any] = {"model": name, "engine": engine, "positions": options.positions}
        part = states.detach()[few].clone().requires_grad_()
        found = gradients(scores, head, part, targets[few], weights[few])
        row["gradient_difference"] = max(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)
        )
        try:
            times: list[float] = []
            for _ in range(options.runs + 1):
                if on_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated() if on_gpu else 0
                started = time.perf_counter()
                gradients(scores, head, states, targets, weights)
                if on_gpu:
                    torch.cuda.synchronize()
                    row["memory_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
                times.append(time.perf_counter() - started)
            row["milliseconds"] = 1e3 * min(times[1:])
        except torch.OutOfMemoryError:
            row["milliseconds"] = None
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small projection and few positions")
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = SIZES
    if options.tiny:
        sizes, options.positions = {"tiny": (32, 512)}, 64
    rows = [row for name, size in sizes.items() for row in measure(name, size, options)]
    print(f"{'model':14s} {'engine':28s} {'ms':>9s} {'GiB':>7s} {'gradient off by':>16s}")
    for row in rows:
        spent = "no room" if row["milliseconds"] is None else f"{row['milliseconds']:.1f}"
        memory = f"{row['memory_gib']:.2f}" if "memory_gib" in row else ""
        print(
            f"{row['model']:14s} {row['engine']:28s} {spent:>9s} {memory:>7s} "
            f"{row['gradient_difference']:16.1e}"
        )
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
