"""Batch <-> DataProto and TensorDict without loss, and the same credit and loss on both sides."""

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("verl")

from turnwise.algos import build_algorithm, compute_advantages, policy_loss, token_weights
from turnwise.algos.table import PRESETS
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch, collate
from turnwise.integrations.verl.rollout.convert import (
    batch_from_dataproto,
    batch_from_tensordict,
    batch_to_dataproto,
    batch_to_tensordict,
)
from turnwise.integrations.verl.trainer import losses
from turnwise.types import Sample

pytestmark = pytest.mark.verl


@st.composite
def samples(draw: st.DrawFn, number: int) -> Sample:
    """A prompt, then runs of sampled and given tokens, ending in either."""
    prompt = draw(st.integers(1, 4))
    runs = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3))
    mask = [False] * prompt
    turns = [-1] * prompt
    for turn, (said, seen) in enumerate(runs):
        mask += [True] * said + [False] * seen
        turns += [turn] * said + [-1] * seen
    length = len(mask)
    numbers = st.floats(-3, 3, width=32)
    return Sample(
        ids=tuple(draw(st.lists(st.integers(1, 50), min_size=length, max_size=length))),
        response_mask=tuple(mask),
        loss_mask=tuple(on and draw(st.booleans()) for on in mask),
        logprobs=tuple(draw(numbers) if on else 0.0 for on in mask),
        turn_ids=tuple(turns),
        rewards=tuple(draw(numbers) if on else 0.0 for on in mask),
        state_keys={turn: draw(st.sampled_from("abc")) for turn in range(len(runs))},
        episode_id=f"e{number}",
        group_id=draw(st.integers(0, 2)),
        truncated=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    batch = collate([draw(samples(number)) for number in range(draw(st.integers(1, 4)))], pad_id=7)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    real = batch.attention_mask.bool()

    def random() -> torch.Tensor:
        return torch.where(real, torch.randn(real.shape, generator=generator), 0.0)

    extra = {
        name: random()
        for name in ("values", "ref_logprobs", "old_logprobs", "entropies")
        if draw(st.booleans())
    }
    if draw(st.booleans()):
        extra["bootstrap"] = torch.randn(batch.num_rows, generator=generator)
    return batch.replace(**extra)


def _equal(left: Batch, right: Batch) -> None:
    ours, theirs = left.tensors(), right.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype, name


@examples(60)
@given(batches())
def test_a_batch_survives_verls_jagged_form(batch: Batch) -> None:
    _equal(batch, batch_from_tensordict(batch_to_tensordict(batch), pad_id=7))


@examples(60)
@given(batches())
def test_a_batch_survives_verls_padded_form(batch: Batch) -> None:
    _equal(batch, batch_from_dataproto(batch_to_dataproto(batch, pad_id=7), pad_id=7))


def test_the_padded_form_is_verls() -> None:
    """prompt [1 2], said [7 8], seen [3], said [9]; the other row is shorter on both sides"""
    long = Sample(
        ids=(1, 2, 7, 8, 3, 9),
        response_mask=(False, False, True, True, False, True),
        loss_mask=(False, False, True, True, False, True),
        logprobs=(0.0, 0.0, -1.0, -2.0, 0.0, -3.0),
        turn_ids=(-1, -1, 0, 0, -1, 1),
        rewards=(0.0, 0.0, 0.0, 0.5, 0.0, 1.0),
        state_keys={0: "a", 1: "b"},
        episode_id="x",
        group_id=0,
        truncated=False,
    )
    short = Sample(
        ids=(4, 5),
        response_mask=(False, True),
        loss_mask=(False, True),
        logprobs=(0.0, -0.5),
        turn_ids=(-1, 0),
        rewards=(0.0, -1.0),
        state_keys={0: "a"},
        episode_id="y",
        group_id=0,
        truncated=False,
    )
    data = batch_to_dataproto(collate([long, short]), pad_id=0).batch
    assert data["prompts"].tolist() == [[1, 2], [0, 4]]
    assert data["responses"].tolist() == [[7, 8, 3, 9], [5, 0, 0, 0]]
    assert data["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert data["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert data["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1]]
    assert data["rm_scores"].tolist() == [[0.0, 0.5, 0.0, 1.0], [-1.0, 0.0, 0.0, 0.0]]


def _scored(seed: int = 0) -> Batch:
    """Three episodes in two groups, scored by a policy and a critic."""
    rows = []
    for number, turns in enumerate(([3, 2], [4], [1, 2, 2])):
        mask, turn_ids = [False, False], [-1, -1]
        for turn, said in enumerate(turns):
            mask += [True] * said + [False]
            turn_ids += [turn] * said + [-1]
        ends = [index for index in range(len(mask)) if mask[index] and not mask[index + 1]]
        rows.append(
            Sample(
                ids=tuple(range(1, len(mask) + 1)),
                response_mask=tuple(mask),
                loss_mask=tuple(mask),
                logprobs=tuple(-0.5 - 0.1 * index if on else 0.0 for index, on in enumerate(mask)),
                turn_ids=tuple(turn_ids),
                rewards=tuple(
                    float(index % 3) if index in ends else 0.0 for index in range(len(mask))
                ),
                state_keys={turn: f"s{turn}" for turn in range(len(turns))},
                episode_id=f"e{number}",
                group_id=number // 2,
                truncated=number == 2,
            )
        )
    batch = collate(rows)
    generator = torch.Generator().manual_seed(seed)
    mask = batch.response_mask
    noise = torch.where(mask, torch.randn(mask.shape, generator=generator), 0.0)
    return batch.replace(
        values=noise,
        old_logprobs=batch.logprobs + 0.05 * noise,
        bootstrap=torch.tensor([0.0, 0.0, 0.7]),
    )


@pytest.mark.parametrize("name", ["bi_level_gae", "ppo", "turn_gae", "reinforce_pp"])
def test_credit_is_the_same_through_verls_form(name: str) -> None:
    batch = _scored()
    algorithm = build_algorithm(
        AlgoConfig(name=name, lam=0.9 if PRESETS[name].needs_critic else 1.0)
    )
    native, _ = compute_advantages(batch, algorithm)
    there, _ = compute_advantages(batch_from_tensordict(batch_to_tensordict(batch)), algorithm)
    torch.testing.assert_close(there.advantages, native.advantages)
    torch.testing.assert_close(there.returns, native.returns)


@pytest.mark.parametrize(
    "settings_",
    [
        {"name": "bi_level_gae"},
        {"name": "ppo", "clip_high": 0.05, "dual_clip": 1.5},
        {"name": "ppo", "reduction": "sequence_mean"},
        {"name": "bi_level_gae", "surrogate": "cispo"},
        {"name": "ppo", "surrogate": "policy_gradient"},
        {"name": "ppo", "ratio_level": "sequence", "reduction": "sequence_mean"},
        {"name": "ppo", "reduction": "token_sum_norm"},
    ],
)
def test_the_loss_of_verls_worker_is_the_native_loss(settings_: dict[str, object]) -> None:
    """The whole way: jagged tensors, verl's ppo_loss, our registered surrogate, against the native
    loss."""
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from turnwise.integrations.verl.engines import plugin  # noqa: F401 - registers the losses

    algorithm = build_algorithm(AlgoConfig(**settings_))
    batch, _ = compute_advantages(_scored(), algorithm)
    generator = torch.Generator().manual_seed(5)
    logprobs = batch.old_logprobs + 0.3 * torch.randn(batch.input_ids.shape, generator=generator)

    ours = logprobs.clone().requires_grad_()
    weighted = batch.replace(weights=token_weights(batch, algorithm))
    native, _ = policy_loss(ours, weighted, algorithm)
    native.backward()

    data = batch_to_tensordict(batch)
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        clip_ratio_c=algorithm.dual_clip or losses.DUAL_CLIP_OFF,
        loss_agg_mode=losses.REDUCTIONS[algorithm.reduction],
        loss_scale_factor=1024 if algorithm.reduction == "token_sum_norm" else None,
        policy_loss=PolicyLossConfig(loss_mode=losses.loss_mode(algorithm)),
    )
    # verl's model output: position t holds the log-prob of token t + 1
    theirs = logprobs.clone().requires_grad_()
    lengths = batch.lengths.tolist()
    shifted = [
        torch.cat([row[1:length], row[:1]]) for row, length in zip(theirs, lengths, strict=True)
    ]
    output = {"log_probs": torch.nested.as_nested_tensor(shifted, layout=torch.jagged)}
    from verl.utils import tensordict_utils as tu

    tokens = int(batch.loss_mask.sum())
    for name, value in (
        ("dp_size", 1),
        ("batch_num_tokens", tokens),
        ("global_batch_size", batch.num_rows),
    ):
        tu.assign_non_tensor_data(data, name, value)
    loss, _ = ppo_loss(config, output, data)
    torch.testing.assert_close(loss, native)
    loss.backward()
    torch.testing.assert_close(theirs.grad, ours.grad)


def test_our_clip_is_verls_vanilla_loss() -> None:
    """An implementation that is not ours, on the same numbers."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    losses.register()
    generator = torch.Generator().manual_seed(1)
    old, new, advantages = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = torch.rand(4, 6, generator=generator) > 0.3
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.1,
        clip_ratio_high=0.3,
        clip_ratio_c=2.0,
    )
    results = [
        get_policy_loss_fn(name)(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
        )
        for name in ("vanilla", "turnwise_clip_token")
    ]
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1]["actor/pg_clipfrac"] == pytest.approx(
        results[1][1]["actor/pg_clipfrac"], abs=0.2
    )
