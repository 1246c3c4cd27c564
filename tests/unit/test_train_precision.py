"""Low-precision weights with float32 masters, and the fused scores: nothing is lost, and nothing is
copied."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train_parts import algorithm, batch, learner

from turnwise.algos.credit import compute_advantages
from turnwise.config.schema import TrainConfig
from turnwise.models.policy import (
    Policy,
    Precision,
    load_model,
    make_critic,
    make_reference,
    prepare,
)
from turnwise.models.scoring import _plain, _towards_target, score_states
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.networks import sampling_model, save_policy
from turnwise.train.optim import Masters, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))

BF16 = Precision(device=torch.device("cpu"), dtype=torch.bfloat16)


def low(*, kind: str = "llama", **overrides: object) -> tuple[Policy, nn.Module]:
    """A bfloat16 policy with critic and reference, and the float32 model that it was made from."""
    model = prepare(tiny_model(kind, **overrides))
    first = make_reference(model)
    critic = make_critic(model, shared=False)
    return Policy(
        model, tiny_tokenizer(), precision=BF16, critic=critic, reference=make_reference(model)
    ), first


def test_parameters_are_cast_and_masters_keep_every_bit() -> None:
    ours, first = low()
    assert ours.critic is not None
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in ours.reference.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in ours.critic.head.parameters()} == {torch.float32}
    assert {b.dtype for b in ours.model.buffers()} == {torch.float32}, (
        "rotary frequencies are not rounded"
    )
    for mine, original in zip(ours.model.parameters(), first.parameters(), strict=True):
        assert torch.equal(ours.masters.of(mine), original)
        assert torch.equal(mine, original.bfloat16())
    assert sampling_model(ours) is ours.model, (
        "the generator samples with the trained module itself"
    )


def test_tied_weights_stay_tied() -> None:
    ours, _ = low(tie_word_embeddings=True)
    assert ours.model.get_input_embeddings().weight is ours.model.get_output_embeddings().weight
    learns = learner(ours, algorithm(), lr=0.01)
    learns.update(
        compute_advantages(learns.score(batch(), old_logprobs=True), learns.algorithm)[0], step=0
    )
    weight = ours.model.get_input_embeddings().weight
    assert torch.equal(weight, ours.masters.of(weight).bfloat16())


def test_an_update_steps_the_masters_and_writes_the_parameters_in_place() -> None:
    ours, first = low()
    learns = learner(ours, algorithm(kl_coef=0.1), lr=1e-5, epochs=3)
    where = [p.data_ptr() for p in ours.model.parameters()]
    rows = compute_advantages(learns.score(batch(), old_logprobs=True), learns.algorithm)[0]
    metrics = learns.update(rows, step=0)
    assert metrics["train/grad_norm"] > 0
    assert [p.data_ptr() for p in ours.model.parameters()] == where
    moved = [
        not torch.equal(ours.masters.of(p), f)
        for p, f in zip(ours.model.parameters(), first.parameters(), strict=True)
    ]
    assert all(moved), "steps below bfloat16's resolution are kept in the masters"
    for parameter in (*ours.parameters(), *ours.critic_parameters()):
        assert parameter.grad is None or parameter.dtype == torch.float32
        assert torch.equal(parameter, ours.masters.of(parameter).to(parameter.dtype))


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_close_to_float32s_and_adds_up_over_micro_batches(packing: bool) -> None:
    found = []
    for precision, tokens in (
        (Precision.choose("float32", device="cpu"), 999),
        (BF16, 999),
        (BF16, 1),
    ):
        ours = Policy(prepare(tiny_model(initializer_range=0.05)), None, precision=precision)
        learns = learner(ours, algorithm("grpo"), micro_batch_tokens=tokens, packing=packing)
        rows = compute_advantages(learns.score(batch(), old_logprobs=True), learns.algorithm)[0]
        learns.gradients(rows)
        found.append(torch.cat([ours.masters.of(p).grad.flatten() for p in ours.parameters()]))
        assert found[-1].dtype == torch.float32
    for other in found[1:]:
        assert torch.nn.functional.cosine_similarity(other, found[0], dim=0) > 0.99
    assert (found[1] - found[2]).norm() < 0.02 * found[1].norm()


def test_saved_weights_are_the_masters(tmp_path: Path) -> None:
    ours, first = low()
    where = [p.data_ptr() for p in ours.model.parameters()]
    save_policy(ours)(tmp_path)
    assert [p.data_ptr() for p in ours.model.parameters()] == where
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    from turnwise.config.schema import ModelConfig

    again = load_model(ModelConfig(path=str(tmp_path)))
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), first.parameters(), strict=True)
    )


def test_an_error_while_the_masters_are_in_place_puts_the_parameters_back() -> None:
    ours, _ = low()

    def fail() -> None:
        with ours.masters.in_place():
            assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}


def test_optimizer_state_goes_on_where_it_was() -> None:
    def run(weight: nn.Parameter, masters: Masters, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            (weight.float() - 3.0).square().sum().backward()
            optimizer.clip()
            optimizer.step(1.0)
            optimizer.zero_grad()
            masters.publish()

    def made(value: torch.Tensor) -> tuple[nn.Parameter, Masters, Optimizer]:
        weight = nn.Parameter(value.clone())
        masters = Masters([weight], torch.bfloat16)
        return weight, masters, Optimizer([([weight], 0.01)], TrainConfig(), masters=masters)

    whole, torn = made(torch.linspace(0, 1, 7)), made(torch.linspace(0, 1, 7))
    run(*whole, 6)
    run(*torn, 3)
    again = made(torn[1].of(torn[0]).detach())
    again[2].load_tensors(torn[2].tensors("a"), "a")
    run(*again, 3)
    assert torch.equal(again[1].of(again[0]), whole[1].of(whole[0]))


def test_a_bfloat16_run_resumes_to_the_bit(tmp_path: Path) -> None:
    from test_train_trainer import _with_model, contents, list_checkpoints, quick, train

    settings = {
        "model": {**_with_model(tmp_path), "dtype": "bfloat16"},
        "algo": {"name": "bi_level_gae", "kl_coef": 0.1},
        "train": {"steps": 2, "max_turn": 2, "lr": 1e-3, "packing": True, "max_gap": 1.0},
    }
    whole = train(quick(tmp_path / "a", **settings), sinks=())
    torn = train(quick(tmp_path / "b", **settings), sinks=())
    (list_checkpoints(torn.path / "checkpoints")[-1] / "manifest.json").unlink()
    train(resume=torn.path, sinks=())
    assert contents(torn.path) == contents(whole.path)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_scores_have_the_plain_scores_gradients(
    softcap: float | None,
    temperature: float,
    size: int,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 11, bias=bias).double()
    states = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    weights = torch.randn(2, 7, dtype=torch.float64)
    wanted = [states, *head.parameters()]

    def both(function) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
        logprobs, entropies = function()
        loss = (weights[0] * logprobs + weights[1] * entropies.square()).sum()
        return (logprobs, entropies), torch.autograd.grad(loss, wanted)

    from turnwise.models import scoring

    plain = both(lambda: _plain(head, states, targets, temperature, softcap))
    monkeypatch.setattr(scoring, "_plain", None)  # only the fused path may run
    fused = both(
        lambda: scoring._Fused.apply(
            states, head.weight, head.bias, targets, temperature, softcap, size
        )
    )
    torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)


def test_fused_scores_bear_impossible_tokens_and_frozen_heads() -> None:
    head = nn.Linear(4, 6, bias=True)
    with torch.no_grad():
        head.bias[2] = -torch.inf
    head.requires_grad_(False)
    states = torch.randn(5, 4, requires_grad=True)
    logprobs, entropies = score_states(
        head,
        states,
        torch.tensor([0, 1, 3, 4, 5]),
        temperature=1.0,
        softcap=None,
        chunk_elements=12,
    )
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.isfinite().all()
    assert entropies.isfinite().all()
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_the_compared_one_hot_is_the_scattered_one() -> None:
    p, targets = torch.rand(4, 7), torch.tensor([0, 6, 3, 3])
    expected = torch.nn.functional.one_hot(targets, 7) - p
    torch.testing.assert_close(_towards_target(p, targets), expected)
