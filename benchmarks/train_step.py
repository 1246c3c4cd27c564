"""Tokens per second of one update, ours against a TRL GRPO step, on the same ids, masks and
advantages in one run.

    python benchmarks/train_step.py [--quick] [--device cuda] [--json FILE]

Both run GRPO's clipped loss over the same rows: forward, backward, gradient clipping, AdamW. Before
anything is timed, the two gradients are compared. Times are CPU seconds of this process on a CPU
and wall seconds on a GPU, the best of several runs. Tokens are real ones, padding not counted.
Without TRL, ours runs alone and the result says so.
"""

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, TrainConfig
from turnwise.data.batch import Batch, collate
from turnwise.models.policy import Policy, Precision, prepare
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.update import Learner
from turnwise.types import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One engine's update, ready to be timed."""

    gradient: Callable[[], None]
    """Forward and backward over the whole batch."""
    update: Callable[[], None]
    """The same, clipped and applied."""
    parameters: Sequence[torch.Tensor]
    """Where the gradient lies after `gradient`."""

    def flat_gradient(self) -> torch.Tensor:
        return torch.cat(
            [p.grad.flatten().float().cpu() for p in self.parameters if p.grad is not None]
        )


def make_batch(
    *,
    rows: int,
    prompt: int,
    turns: int,
    vocabulary: int,
    said_tokens: tuple[int, int] = (8, 25),
    seen_tokens: tuple[int, int] = (8, 25),
    seed: int = 0,
) -> Batch:
    """Multi-turn episodes of different lengths: one prompt, then 1 to `turns` replies with
    observations between."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples: list[Sample] = []
    for row in range(rows):
        ids, mask, turn_ids = (
            [draw(3, vocabulary) for _ in range(prompt)],
            [False] * prompt,
            [-1] * prompt,
        )
        for turn in range(draw(1, turns + 1)):
            for said, length in ((True, draw(*said_tokens)), (False, draw(*seen_tokens))):
                ids += [draw(3, vocabulary) for _ in range(length)]
                mask += [said] * length
                turn_ids += [turn if said else -1] * length
        samples.append(
            Sample(
                ids=tuple(ids),
                response_mask=tuple(mask),
                loss_mask=tuple(mask),
                logprobs=(0.0,) * len(ids),
                turn_ids=tuple(turn_ids),
                rewards=(0.0,) * len(ids),
                state_keys={turn: str(turn) for turn in set(turn_ids) - {-1}},
                episode_id=str(row),
                group_id=row // 4,
                truncated=False,
            )
        )
    batch = collate(samples)
    advantages = torch.randn(rows, 1, generator=generator).expand(-1, batch.input_ids.shape[1])
    return batch.replace(advantages=torch.where(batch.response_mask, advantages, 0.0))


def make_model(*, vocabulary: int, width: int, layers: int) -> Any:
    return prepare(
        tiny_model(
            vocab_size=vocabulary,
            hidden_size=width,
            num_layers=layers,
            num_heads=8,
            num_kv_heads=8,
            seed=1,
            initializer_range=0.02,
        )
    )


def our_step(
    model: Any,
    batch: Batch,
    *,
    tokens: int,
    device: str,
    dtype: str = "float32",
    packing: Literal["auto"] | bool = "auto",
    compile: bool = False,
) -> Step:
    """Our update of the model with micro-batches of so many tokens, its layers compiled or as they
    are."""
    precision = Precision.choose(dtype, device=device)
    policy = Policy(model, None, precision=precision, compile=compile)
    config = TrainConfig(micro_batch_tokens=tokens, lr=1e-6, max_gap=1e9, packing=packing)
    learner = Learner(policy, build_algorithm(AlgoConfig(name="grpo")), config, seed=0)
    rows = learner.score(batch.to(precision.device), old_logprobs=True)
    policy.train_mode(True)
    return Step(
        gradient=lambda: _ignore(learner.gradients(rows)),
        update=lambda: _ignore(learner.update(rows, step=0)),
        parameters=learner.optimizer.parameters,
    )


def trl_step(
    model: Any,
    batch: Batch,
    *,
    prompt: int,
    micro_rows: int,
    device: str,
    folder: str,
    autocast: torch.dtype | None = None,
) -> Step:
    """TRL's own loss on the same rows, then its clipping and AdamW, as its trainer has them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=micro_rows,
        num_generations=2,
        loss_type="grpo",
        beta=0.0,
        report_to=[],
        use_cpu=device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        max_grad_norm=1.0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = batch.num_rows // micro_rows
    batch = batch.to(next(model.parameters()).device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, weight_decay=0.0, fused=device != "cpu" or None
    )
    assert batch.advantages is not None
    inputs = {
        "prompt_ids": batch.input_ids[:, :prompt],
        "prompt_mask": batch.attention_mask[:, :prompt],
        "completion_ids": batch.input_ids[:, prompt:],
        "completion_mask": batch.attention_mask[:, prompt:],
        "tool_mask": batch.response_mask[:, prompt:].long(),
        "advantages": batch.advantages.sum(-1) / batch.response_mask.sum(-1),
    }
    count = batch.response_mask.sum()

    def gradient() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.train()
        for rows in torch.arange(batch.num_rows).split(micro_rows):
            part = {name: tensor[rows] for name, tensor in inputs.items()}
            part["num_items_in_batch"] = count
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                loss = trainer.compute_loss(model, part)
            loss.backward()

    def update() -> None:
        gradient()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Step(gradient=gradient, update=update, parameters=list(model.parameters()))


def best(function: Callable[[], None], *, runs: int, device: str) -> float:
    """Seconds of the fastest of several runs."""
    times: list[float] = []
    for _ in range(runs + 1):
        started = _clock(device)
        function()
        times.append(_clock(device) - started)
    return min(times[1:])


def measure(
    *,
    rows: int,
    prompt: int,
    turns: int,
    vocabulary: int,
    width: int,
    layers: int,
    device: str,
    runs: int,
) -> dict[str, Any]:
    """Tokens per second of both, the gradients compared first."""
    batch = make_batch(rows=rows, prompt=prompt, turns=turns, vocabulary=vocabulary)
    micro_rows = 4
    model = make_model(vocabulary=vocabulary, width=width, layers=layers)
    step = our_step(model, batch, tokens=micro_rows * batch.input_ids.shape[1], device=device)
    step.gradient()
    ours = step.flat_gradient()
    result: dict[str, Any] = {
        "rows": rows,
        "tokens": batch.num_tokens,
        "padded_tokens": batch.input_ids.numel(),
        "vocabulary": vocabulary,
        "device": device,
        "turnwise_tokens_per_second": batch.num_tokens
        / best(step.update, runs=runs, device=device),
    }
    if importlib.util.find_spec("trl") is None:
        return {**result, "trl": "not installed; turnwise ran alone"}
    model = make_model(vocabulary=vocabulary, width=width, layers=layers).to(device)
    with tempfile.TemporaryDirectory() as folder:
        step = trl_step(
            model, batch, prompt=prompt, micro_rows=micro_rows, device=device, folder=folder
        )
        step.gradient()
        theirs = step.flat_gradient()
        seconds = best(step.update, runs=runs, device=device)
    result["gradient_difference"] = float((ours - theirs).norm() / theirs.norm())
    result["trl_tokens_per_second"] = batch.num_tokens / seconds
    result["ratio"] = result["turnwise_tokens_per_second"] / result["trl_tokens_per_second"]
    return result


def _ignore(_: object) -> None:
    return None


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small model and few rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = {"rows": 8, "turns": 3, "vocabulary": 512, "width": 32, "layers": 1, "runs": 1}
    if not options.quick:
        size = {"rows": 16, "turns": 6, "vocabulary": 32_000, "width": 256, "layers": 4, "runs": 3}
    with contextlib.suppress(RuntimeError):
        torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    result = measure(prompt=48, device=options.device, **size)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
