"""The update on CUDA: packed bfloat16 against padded, against float32, and without waiting for the
device."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from train_parts import algorithm, batch, learner

from turnwise.algos.credit import compute_advantages
from turnwise.models.packing import has_kernel, packed_attention
from turnwise.models.policy import Policy, Precision, make_critic, make_reference, prepare
from turnwise.models.scoring import _Fused, _plain
from turnwise.testing.tiny import tiny_model
from turnwise.train.update import Learner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SHAPE = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.05,
}


def made(
    kind: str = "llama",
    *,
    dtype: str = "bfloat16",
    checkpointing: bool = False,
    compile: bool = False,
    **settings: object,
) -> Learner:
    model = prepare(tiny_model(kind, **SHAPE), gradient_checkpointing=checkpointing)
    ours = Policy(
        model,
        None,
        precision=Precision.choose(dtype, device="cuda"),
        critic=make_critic(model, shared=False),
        reference=make_reference(model),
        compile=compile,
    )
    return learner(ours, algorithm(entropy_coef=0.01, kl_coef=0.1), **settings)


def gradient(learns: Learner) -> torch.Tensor:
    rows = compute_advantages(
        learns.score(batch().to("cuda"), old_logprobs=True), learns.algorithm
    )[0]
    learns.policy.train_mode(True)
    learns.gradients(rows)
    masters = learns.policy.masters
    parameters = [*learns.policy.parameters(), *learns.policy.critic_parameters()]
    return torch.cat(
        [masters.of(p).grad.flatten() for p in parameters if masters.of(p).grad is not None]
    )


def close(found: torch.Tensor, expected: torch.Tensor, *, by: float) -> None:
    assert (found - expected).norm() <= by * expected.norm(), float(
        (found - expected).norm() / expected.norm()
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3)])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_kernel_equals_attention_row_by_row(heads: tuple[int, int], dim: int) -> None:
    torch.manual_seed(0)
    lengths = [5, 1, 130, 17]
    boundaries = torch.tensor(
        [0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
    )
    arguments = {"scaling": 0.1, "cu_seq_lens_q": boundaries, "max_length_q": max(lengths)}
    states = [
        torch.randn(1, h, sum(lengths), dim, device="cuda", dtype=torch.float64)
        for h in (heads[0], *heads[1:] * 2)
    ]
    found, expected = [], []
    for dtype, out in ((torch.bfloat16, found), (torch.float32, expected)):
        leaves = [s.bfloat16().to(dtype).detach().requires_grad_() for s in states]
        assert has_kernel(leaves[0].device, dtype) is (dtype == torch.bfloat16)
        result, _ = packed_attention(torch.nn.Identity(), *leaves, **arguments)
        result.float().square().sum().backward()
        out += [result.float(), *(leaf.grad.float() for leaf in leaves)]
    for a, b in zip(found, expected, strict=True):
        close(a, b, by=0.02)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_packing_is_on_by_itself_and_gives_the_padded_gradient(kind: str) -> None:
    exact = gradient(made(kind, dtype="float32", packing=False))
    padded, packed = gradient(made(kind, packing=False)), made(kind)
    assert packed.passes.packing
    found = gradient(packed)
    close(found, exact, by=0.05)
    close(found, padded, by=0.05)
    close(gradient(made(kind, micro_batch_tokens=8)), found, by=0.05)
    close(gradient(made(kind, checkpointing=True)), found, by=0.05)


def test_float32_can_be_packed_too() -> None:
    close(
        gradient(made(dtype="float32", packing=True)),
        gradient(made(dtype="float32", packing=False)),
        by=1e-4,
    )


def test_an_update_keeps_the_storage_and_publishes_the_masters() -> None:
    learns = made(lr=1e-3, mini_batches=2)
    where = [p.data_ptr() for p in learns.policy.model.parameters()]
    before = [p.clone() for p in learns.policy.model.parameters()]
    rows = compute_advantages(
        learns.score(batch().to("cuda"), old_logprobs=True), learns.algorithm
    )[0]
    metrics = learns.update(rows, step=0)
    assert metrics["train/grad_norm"] > 0
    assert [p.data_ptr() for p in learns.policy.model.parameters()] == where
    assert any(
        not torch.equal(a, b) for a, b in zip(before, learns.policy.model.parameters(), strict=True)
    )
    for parameter in learns.policy.parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, learns.policy.masters.of(parameter).bfloat16())


def test_fused_adam_resumes() -> None:
    one, two = made(lr=1e-3), made(lr=1e-3)
    rows = compute_advantages(one.score(batch().to("cuda"), old_logprobs=True), one.algorithm)[0]
    one.update(rows, step=0)
    with one.policy.masters.in_place(), two.policy.masters.in_place():
        two.policy.model.load_state_dict(one.policy.model.state_dict())
    two.optimizer.load_tensors({n: t.cpu() for n, t in one.optimizer.tensors("a").items()}, "a")
    for learns in (one, two):
        learns.gradients(rows)
        learns.optimizer.clip()
        learns.optimizer.step(1.0)
    for a, b in zip(one.optimizer.parameters, two.optimizer.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_micro_batches_run_without_waiting_for_the_device() -> None:
    learns = made(micro_batch_tokens=8)
    rows = compute_advantages(
        learns.score(batch().to("cuda"), old_logprobs=True), learns.algorithm
    )[0]
    rows = rows.replace(weights=rows.loss_mask.float() / rows.loss_mask.sum())
    learns.policy.train_mode(True)
    with learns.policy.packed():
        # Compiles.
        learns._loss(learns.passes.micro_batches(rows, packed=True)[0], warming=False)[0].backward()
        parts = learns.passes.micro_batches(rows, packed=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for part in parts:
                learns._loss(part, warming=False)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("size", [64, 1000])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_compiled_scores_equal_plain_ones(
    size: int, softcap: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 5000, bias=False, device="cuda")
    states = torch.randn(200, 64, device="cuda", requires_grad=True)
    targets = torch.randint(0, 5000, (200,), device="cuda")
    found = []
    for function in (
        lambda: _plain(head, states, targets, 0.8, softcap),
        lambda: _Fused.apply(states, head.weight, head.bias, targets, 0.8, softcap, size),
    ):
        logprobs, entropies = function()
        loss = logprobs.sum() + 0.1 * entropies.sum()
        found.append([logprobs, entropies, *torch.autograd.grad(loss, [states, head.weight])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    assert "uncompiled" not in caplog.text


def test_compiled_layers_give_the_same_gradient_and_are_compiled_in_one_piece() -> None:
    import torch._dynamo.utils as dynamo

    plain = gradient(made(packing=True))
    dynamo.counters.clear()
    close(gradient(made(compile=True, packing=True)), plain, by=0.02)
    assert dynamo.counters["frames"]["ok"] > 0
    assert not dynamo.counters["graph_break"], dict(dynamo.counters["graph_break"])
