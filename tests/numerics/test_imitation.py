"""The loss of imitation against a loop over rows, packed and padded, with and without
observations."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from train_parts import batch, policy

from turnwise.config.schema import TrainConfig
from turnwise.data.batch import Batch
from turnwise.models.policy import Policy
from turnwise.train.imitation import Imitator, rate_factor, with_all_tokens, with_targets

# The rows of train_parts.samples, with what is said: "." a prompt, a digit a turn.
RULERS = ["..00.1", "..00", "..0..111", ".00", ".00..1122"]


def naive(model: Policy, rows: Batch, weights: list[list[float]]) -> torch.Tensor:
    """The weighted mean of every target's negative log-prob, row by row and token by token."""
    total, loss = 0.0, torch.zeros(())
    for row, own in enumerate(weights):
        ids = rows.input_ids[row, : len(own)]
        logits = model.model(input_ids=ids[None], use_cache=False).logits[0]
        for place, weight in enumerate(own):
            if weight:
                loss = loss - weight * torch.log_softmax(logits[place - 1], -1)[ids[place]]
                total += weight
    return loss / total


def weights_of(observations: float) -> list[list[float]]:
    found: list[list[float]] = []
    for ruler in RULERS:
        first = next(place for place, sign in enumerate(ruler) if sign != ".")
        found.append(
            [
                1.0 if sign != "." else observations if place > first else 0.0
                for place, sign in enumerate(ruler)
            ]
        )
    return found


@pytest.mark.parametrize("observations", [0.0, 1.0, 0.25])
@pytest.mark.parametrize(("packing", "tokens"), [(False, 10**6), (False, 9), (True, 64), (True, 9)])
def test_loss_and_gradient_are_those_of_a_loop(
    packing: bool, tokens: int, observations: float
) -> None:
    model, rows = policy(critic=None), batch()
    expected = naive(model, rows, weights_of(observations))
    expected.backward()
    gradient = {name: p.grad.clone() for name, p in model.model.named_parameters()}
    model.model.zero_grad()
    settings = TrainConfig(packing=packing, micro_batch_tokens=tokens)
    imitator = Imitator(model, settings, lr=1e-3)
    loss = imitator.gradients(with_targets(rows, observations=observations))
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-4, atol=1e-6)


def test_untrained_turns_are_context() -> None:
    rows = batch()
    skipped = rows.replace(loss_mask=rows.loss_mask & (rows.turn_ids != 1))
    found = with_targets(skipped, observations=0.5)
    assert found.weights is not None
    assert not found.weights[rows.turn_ids == 1].any()
    assert (found.weights[rows.turn_ids == 0] == 1.0).all()
    # What comes after the first reply and is nobody's reply is an answer, whoever is trained.
    assert found.weights[0].tolist()[:6] == [0.0, 0.0, 1.0, 1.0, 0.5, 0.0]


def test_every_token_but_the_first_can_be_a_target() -> None:
    rows = batch()
    found = with_all_tokens(rows)
    assert found.weights is not None
    assert found.weights.sum(-1).tolist() == (rows.lengths - 1).tolist()
    assert not found.weights[:, 0].any()


def test_measuring_counts_replies_alone() -> None:
    model, rows = policy(critic=None), batch()
    imitator = Imitator(model, TrainConfig(packing=False), lr=1e-3)
    found = imitator.measure([rows])
    with torch.no_grad():
        expected = naive(model, rows, weights_of(0.0))
        logits = model.model(input_ids=rows.input_ids, use_cache=False).logits
    mask = rows.response_mask[:, 1:]
    hits = (logits[:, :-1].argmax(-1) == rows.input_ids[:, 1:])[mask]
    assert found.tokens == int(rows.response_mask.sum())
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    assert found.accuracy == pytest.approx(hits.float().mean().item())
    packed = Imitator(model, TrainConfig(packing=True, micro_batch_tokens=9), lr=1e-3)
    assert packed.measure([rows]).loss == pytest.approx(found.loss, rel=1e-5)


def test_the_learning_rate_rises_and_falls() -> None:
    factors = [rate_factor(step, 100) for step in range(100)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(factors[5:70]) == {1.0}
    assert factors[-1] == pytest.approx(1 / 30)
    assert rate_factor(0, 1) == 1.0
