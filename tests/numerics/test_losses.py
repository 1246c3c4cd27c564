"""Losses: closed forms, and the same loss and gradient for every split, order and padding."""

import math

import pytest
import torch
from algo_batches import make_batch, pad_right
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turnwise.algos import (
    PRESETS,
    build_algorithm,
    compute_advantages,
    policy_loss,
    token_weights,
    value_loss,
)
from turnwise.algos.reduce import token_weights_of
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch

SPLITS = [  # rows of each micro-batch, further pads
    ([[0], [1], [2], [3], [4]], 0),
    ([[4, 1], [0, 3, 2]], 0),
    ([[2, 0, 1, 4, 3]], 9),
    ([[3], [0, 4], [1, 2]], 5),
]
REDUCTIONS = ["token_mean", "sequence_mean", "episode_mean", "token_sum_norm"]


def ready(name: str = "ppo", *, dtype: torch.dtype = torch.float64, **algo: object):
    """A batch with advantages, references and weights, its algorithm, and new log-probs to score it
    with."""
    batch = make_batch(
        [[(3, 1.0)], [(2, 0.5), (4, 0.0)], [(5, 2.0)], [(1, 0.3)], [(2, -1.0), (1, 1.0)]],
        episodes=[0, 1, 2, 0, 3],
        first_turns=[0, 0, 0, 1, 0],
        dtype=dtype,
    )
    algorithm = build_algorithm(AlgoConfig.model_validate({"name": name, **algo}))
    batch, _ = compute_advantages(batch, algorithm)
    weights = token_weights(batch, algorithm).to(dtype)
    noise = torch.randn(
        batch.rewards.shape, generator=torch.Generator().manual_seed(3), dtype=dtype
    )
    batch = batch.replace(
        weights=weights,
        ref_logprobs=torch.where(batch.response_mask, batch.logprobs + 0.2 * noise, 0.0),
        old_logprobs=torch.where(batch.response_mask, batch.logprobs - 0.1 * noise.flip(0), 0.0),
    )
    return (
        batch,
        algorithm,
        torch.where(batch.response_mask, batch.logprobs + 0.3 * noise.flip(1), 0.0),
    )


def loss_and_gradient(batch: Batch, algorithm, new: Tensor, chunks: list[Tensor], pad: int = 0):
    """The summed loss, metrics and the gradient of every token's log-prob, value and entropy over
    the micro-batches."""
    leaf = torch.stack([new, 0.5 * new, -new]).requires_grad_()
    total, sums = 0.0, {}
    for rows in chunks:
        picked = batch.replace(returns=batch.returns)
        part = Batch(**{name: tensor[rows] for name, tensor in picked.tensors().items()})
        inputs = leaf[:, rows]
        if pad:
            part = pad_right(part, pad)
            inputs = torch.cat(
                [inputs, inputs.new_full((*inputs.shape[:2], pad), torch.nan)], dim=-1
            )
        entropies = inputs[2] if algorithm.entropy_coef else None
        policy, metrics = policy_loss(inputs[0], part, algorithm, entropies=entropies)
        loss = policy
        if algorithm.needs_critic:
            value, more = value_loss(inputs[1], part, algorithm)
            loss, metrics = loss + value, metrics | more
        loss.backward()
        total += float(loss.detach())
        for name, metric in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(metric)
    return total, sums, leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(PRESETS))
def test_split_order_and_padding_change_nothing(name, dtype) -> None:
    """Invariant 5, for every preset, with KL and entropy in the loss and importance sampling on."""
    batch, algorithm, new = ready(
        name, dtype=dtype, kl_coef=0.1, entropy_coef=0.01, tis_cap=1.5, singleton="zero"
    )
    loss, metrics, gradient = loss_and_gradient(batch, algorithm, new, [torch.arange(5)])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for chunks, pad in SPLITS:
        found = loss_and_gradient(
            batch, algorithm, new, [torch.tensor(chunk) for chunk in chunks], pad
        )
        assert found[0] == pytest.approx(loss, abs=tolerance)
        assert found[1] == pytest.approx(metrics, abs=10 * tolerance)
        torch.testing.assert_close(found[2], gradient, atol=tolerance, rtol=0)


@examples(25)
@given(
    st.permutations(range(5)),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from(REDUCTIONS),
)
def test_any_partition_adds_up(order, cuts, reduction) -> None:
    batch, algorithm, new = ready("ppo", reduction=reduction)
    chunks: list[list[int]] = [[order[0]]]
    for row, cut in zip(order[1:], cuts, strict=True):
        chunks.append([row]) if cut else chunks[-1].append(row)
    whole = loss_and_gradient(batch, algorithm, new, [torch.arange(5)])
    parts = loss_and_gradient(batch, algorithm, new, [torch.tensor(chunk) for chunk in chunks])
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    torch.testing.assert_close(parts[2], whole[2], atol=1e-12, rtol=0)


def test_split_of_batch_adds_up_and_weighing_each_part_alone_would_not() -> None:
    batch, algorithm, new = ready("ppo", dtype=torch.float32)
    whole, _ = policy_loss(new, batch, algorithm)
    carried = batch.replace(values=new)  # carries the new log-probs through the split
    parts = carried.split(max_tokens=24)
    assert len(parts) > 1
    summed = sum(float(policy_loss(part.values, part, algorithm)[0]) for part in parts)
    assert summed == pytest.approx(float(whole), abs=1e-6)
    alone = [
        part.replace(
            weights=token_weights(
                part, build_algorithm(AlgoConfig(name="ppo", reduction="token_mean"))
            )
        )
        for part in parts
    ]
    wrong = sum(float(policy_loss(part.values, part, algorithm)[0]) for part in alone) / len(alone)
    assert abs(wrong - float(whole)) > 1e-3  # the test can tell


@pytest.mark.parametrize("name", list(PRESETS))
def test_nan_outside_the_loss_mask_reaches_neither_loss_nor_gradient(name) -> None:
    """Invariant 12, on the losses."""
    batch, algorithm, new = ready(
        name, kl_coef=0.1, entropy_coef=0.01, tis_cap=1.5, singleton="zero"
    )
    loss_mask = batch.loss_mask.clone()
    loss_mask[2, 3] = False  # an action token that is not trained on
    batch = batch.replace(loss_mask=loss_mask)
    floats = (
        "logprobs",
        "old_logprobs",
        "ref_logprobs",
        "advantages",
        "returns",
        "values",
        "weights",
        "rewards",
    )
    dirty = {field: torch.where(loss_mask, getattr(batch, field), torch.nan) for field in floats}
    clean = loss_and_gradient(batch, algorithm, new, [torch.arange(5)])
    found = loss_and_gradient(
        batch.replace(**dirty), algorithm, torch.where(loss_mask, new, torch.nan), [torch.arange(5)]
    )
    assert found[0] == clean[0]
    assert found[1] == clean[1]
    torch.testing.assert_close(found[2], clean[2], atol=0, rtol=0)
    assert (found[2][:, ~loss_mask] == 0).all()


def one_token(advantage: float, *, old: float = -1.0, **algo: object):
    """A batch of one trained token, and its algorithm."""
    batch = make_batch([[(1, 0.0)]], gap=0, dtype=torch.float64)
    full = torch.full((1, 1), old, dtype=torch.float64)
    ones = torch.ones_like(full)
    batch = batch.replace(
        logprobs=full, advantages=advantage * ones, weights=ones, returns=ones, ref_logprobs=full
    )
    return batch, build_algorithm(AlgoConfig.model_validate(algo))


def value_and_slope(batch: Batch, algorithm, ratio: float) -> tuple[float, float]:
    new = (batch.logprobs + math.log(ratio)).requires_grad_()
    loss, _ = policy_loss(new, batch, algorithm)
    loss.backward()
    assert new.grad is not None
    return float(loss.detach()), float(new.grad)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (2.0, 1.1, -2.2, -2.2),  # inside
        (2.0, 1.5, -2.0 * 1.28, 0.0),  # clipped above by its own bound
        (2.0, 0.5, -1.0, -1.0),  # the minimum is the free one
        (-2.0, 0.5, 2.0 * 0.8, 0.0),  # clipped below
        (-2.0, 1.5, 3.0, 3.0),  # the minimum is the free one
        (-2.0, 9.0, 2.0 * 3.0, 0.0),  # the dual clip bounds it
    ],
)
def test_ppo_clip_by_hand(advantage, ratio, loss, slope) -> None:
    batch, algorithm = one_token(advantage, name="ppo", clip_high=0.28, dual_clip=3.0)
    assert value_and_slope(batch, algorithm, ratio) == pytest.approx((loss, slope))
    _, metrics = policy_loss(batch.logprobs + math.log(ratio), batch, algorithm)
    assert float(metrics["clip_fraction"]) == (1.0 if slope == 0 else 0.0)


def test_cispo_weighs_the_log_prob_and_keeps_the_gradient() -> None:
    batch, algorithm = one_token(2.0, name="cispo", clip_high=1.0)
    assert value_and_slope(batch, algorithm, 5.0)[1] == pytest.approx(-2.0 * 2.0)
    assert value_and_slope(batch, algorithm, 1.5)[1] == pytest.approx(-1.5 * 2.0)
    assert value_and_slope(batch, algorithm, 1.5)[0] == pytest.approx(
        -1.5 * 2.0 * (-1.0 + math.log(1.5))
    )


def test_policy_gradient_on_policy_is_reinforce() -> None:
    batch, algorithm = one_token(2.0, name="rloo")
    assert value_and_slope(batch, algorithm, 1.0) == pytest.approx((-2.0, -2.0))
    assert value_and_slope(batch, algorithm, 3.0) == pytest.approx((-6.0, -6.0))


def test_gspo_has_the_sequence_form_gradient() -> None:
    """One advantage per row: loss -mean_i(s_i A_i) with s_i = exp(mean log-ratio), clipped;
    autograd on that form."""
    batch, algorithm, new = ready("gspo", clip_low=0.1, clip_high=0.15)
    batch = batch.replace(old_logprobs=None)
    token_form = new.clone().requires_grad_()
    loss, metrics = policy_loss(token_form, batch, algorithm)
    loss.backward()
    sequence_form = new.clone().requires_grad_()
    mask = batch.loss_mask
    mean = torch.where(mask, sequence_form - batch.logprobs, 0.0).sum(-1) / mask.sum(-1)
    ratio, advantage = mean.exp(), batch.advantages.sum(-1) / mask.sum(-1)
    wanted = -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage).mean()
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()))
    torch.testing.assert_close(token_form.grad, sequence_form.grad, atol=1e-7, rtol=1e-6)
    assert 0 < float(metrics["clip_fraction"]) < 1


def test_truncated_importance_sampling() -> None:
    batch, algorithm = one_token(2.0, name="ppo", tis_cap=1.5)
    old = batch.logprobs
    plain, _ = policy_loss(old, batch, algorithm)  # no old_logprobs: the ratio itself corrects
    assert float(plain) == pytest.approx(-2.0)
    for gap, weight in ((0.2, math.exp(0.2)), (2.0, 1.5), (-1.0, math.exp(-1.0))):
        shifted = batch.replace(logprobs=old - gap, old_logprobs=old)
        loss, metrics = policy_loss(old, shifted, algorithm)
        assert float(loss) == pytest.approx(-2.0 * weight)
        assert float(metrics["tis_weight"]) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("form", "kl"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)]
)  # policy above the reference by 0.5
def test_kl_and_entropy_in_the_loss(form, kl) -> None:
    batch, algorithm = one_token(0.0, name="grpo", kl_coef=0.1, kl_form=form, entropy_coef=0.01)
    batch = batch.replace(ref_logprobs=batch.logprobs - 0.5)
    entropies = torch.full((1, 1), 3.0)
    loss, metrics = policy_loss(batch.logprobs, batch, algorithm, entropies=entropies)
    assert float(loss) == pytest.approx(0.1 * kl - 0.01 * 3.0)
    assert float(metrics["kl_ref"]) == pytest.approx(kl)
    with pytest.raises(ValueError, match="pass entropies="):
        policy_loss(batch.logprobs, batch, algorithm)


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [(0.1, 0.5 * 0.81, -0.9), (0.6, 0.5 * 0.64, 0.0), (-0.5, 0.5 * 2.25, -1.5)],
)
def test_value_loss_by_hand(value, loss, slope) -> None:
    """Return 1, old value 0, clip 0.2: moving 0.6 towards the return is only believed to 0.2."""
    batch, algorithm = one_token(0.0, name="ppo")
    values = torch.full((1, 1), value, dtype=torch.float64, requires_grad=True)
    batch = batch.replace(values=torch.zeros(1, 1, dtype=torch.float64))
    found, _ = value_loss(values, batch, algorithm)
    found.backward()
    assert (float(found.detach()), float(values.grad)) == pytest.approx((loss, slope))


def test_what_is_missing_is_named() -> None:
    batch, algorithm, new = ready("ppo")
    for field in ("weights", "advantages"):
        with pytest.raises(ValueError, match=rf"needs Batch\.{field}"):
            policy_loss(new, batch.replace(**{field: None}), algorithm)
    with pytest.raises(ValueError, match=r"needs Batch\.returns"):
        value_loss(new, batch.replace(returns=None), algorithm)
    _, with_kl, _ = ready("ppo", kl_coef=0.1)
    with pytest.raises(ValueError, match=r"needs Batch\.ref_logprobs"):
        policy_loss(new, batch.replace(ref_logprobs=None), with_kl)


def test_enormous_ratios_stay_finite() -> None:
    batch, algorithm = one_token(-1.0, name="ppo", old=-500.0)
    loss, slope = value_and_slope(batch, algorithm, 1e200)
    assert math.isfinite(loss)
    assert math.isfinite(slope)


def test_reductions_by_hand() -> None:
    """Rows of 1, 2 and 1 trained tokens; the first two are one episode."""
    mask = torch.tensor([[True, False], [True, True], [False, True]])
    episodes = torch.tensor([7, 7, 9])
    found = {
        name: token_weights_of(mask, episodes, name, norm_tokens=10.0)[mask].tolist()
        for name in REDUCTIONS
    }
    assert found["token_mean"] == pytest.approx([1 / 4] * 4)
    assert found["sequence_mean"] == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 3])
    assert found["episode_mean"] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert found["token_sum_norm"] == pytest.approx([1 / 20] * 4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_without_trained_tokens_do_not_count(reduction) -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    found = token_weights_of(mask, torch.tensor([0, 1, 2]), reduction)
    wanted = token_weights_of(mask[[0, 2]], torch.tensor([0, 2]), reduction)
    torch.testing.assert_close(found[[0, 2]], wanted)
    assert (
        token_weights_of(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]), reduction)
        .abs()
        .sum()
        == 0
    )
