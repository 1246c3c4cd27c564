"""Updates: the same loss and gradient however a mini-batch is cut, and nothing moves on a bad
number."""

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from train_parts import CPU, algorithm, batch, learner, policy

from turnwise.algos.credit import compute_advantages
from turnwise.config.schema import LoraConfig
from turnwise.data.batch import Batch
from turnwise.models.policy import Policy, add_lora, prepare
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.update import Learner, TrainingError

NAMES = ["ppo", "bi_level_gae", "grpo", "dr_grpo", "gspo", "cispo"]


def ready(ours: Learner) -> Batch:
    scored = ours.score(batch(), old_logprobs=False)
    return compute_advantages(scored, ours.algorithm)[0]


def assert_same_gradient(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32's rounding of the sums, whose order the split decides: a millionth of
    the largest."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def gradient(ours: Learner, rows: Batch) -> torch.Tensor:
    ours.gradients(rows)
    parameters = [*ours.policy.parameters(), *ours.policy.critic_parameters()]
    return torch.cat(
        [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in parameters]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_gradient_is_the_same_for_every_split(name: str, critic: str) -> None:
    needs = algorithm(name).needs_critic
    if not needs and critic == "shared":
        pytest.skip("no critic to share a trunk with")
    found = []
    for tokens in (10_000, 20, 1):
        ours = learner(
            policy(critic=critic if needs else None), algorithm(name), micro_batch_tokens=tokens
        )
        rows = ready(ours)
        found.append((gradient(ours, rows), ours.gradients(rows)["policy_loss"]))
    for grad, loss in found[1:]:
        assert_same_gradient(grad, found[0][0])
        assert loss == pytest.approx(found[0][1], rel=1e-4, abs=1e-7)


@examples(10)
@given(
    order=st.permutations(range(5)),
    extra=st.integers(0, 4),
    tokens=st.sampled_from([1, 9, 18, 999]),
)
def test_neither_order_nor_padding_changes_the_gradient(
    order: list[int], extra: int, tokens: int
) -> None:
    ours = learner(policy(), algorithm(entropy_coef=0.1), micro_batch_tokens=999)
    rows = ready(ours)
    expected = gradient(ours, rows)
    other = learner(ours.policy, ours.algorithm, micro_batch_tokens=tokens)
    mixed = rows.replace(**{name: t[torch.tensor(order)] for name, t in rows.tensors().items()})
    padded = mixed.replace(
        **{
            name: torch.nn.functional.pad(
                t, (0, extra), value=-1 if name in ("turn_ids", "state_ids") else 0
            )
            for name, t in mixed.tensors().items()
            if t.dim() == 2
        }
    )
    assert_same_gradient(gradient(other, padded), expected)


def test_a_nan_in_a_masked_position_reaches_nothing() -> None:
    ours = learner(policy(), algorithm())
    rows = ready(ours)
    expected = gradient(ours, rows)
    dirty = rows.advantages.clone()
    dirty[~rows.loss_mask] = torch.nan
    torch.testing.assert_close(gradient(ours, rows.replace(advantages=dirty)), expected)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo"])
def test_a_row_that_is_not_trained_on_changes_no_gradient(name: str) -> None:
    critic = "separate" if algorithm(name).needs_critic else None
    ours = learner(policy(critic=critic), algorithm(name))
    rows = ready(ours)
    trained = rows.loss_mask.clone()
    trained[2] = False
    others = rows.select(torch.tensor([0, 1, 3, 4]))
    assert_same_gradient(gradient(ours, rows.replace(loss_mask=trained)), gradient(ours, others))


def test_the_order_of_mini_batches_ignores_the_global_generator() -> None:
    def weights(global_seed: int) -> list[torch.Tensor]:
        ours = learner(policy(), algorithm(), lr=0.1, epochs=2, mini_batches=5)
        rows = ready(ours)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            ours.update(rows, step=0)
        return [value.clone() for value in ours.policy.model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(2), strict=True))


def test_the_gap_to_the_sampler_is_a_metric_of_the_update() -> None:
    ours = learner(policy(), algorithm())
    rows = ready(ours)
    with torch.no_grad():
        gaps = (ours.policy.score(rows).logprobs - rows.logprobs).abs()[rows.loss_mask]
    metrics = ours.update(rows, step=0)
    assert metrics["train/gap_mean"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert metrics["train/gap_max"] == pytest.approx(float(gaps.max()), rel=1e-4)


@pytest.mark.parametrize("where", ["advantages", "returns"])
def test_a_bad_number_stops_the_update_before_any_weight_moves(where: str) -> None:
    ours = learner(policy(), algorithm(), lr=0.1)
    rows = ready(ours)
    tensor = rows.tensors()[where].clone()
    tensor[rows.loss_mask.nonzero()[0].tolist()[0], rows.loss_mask.nonzero()[0].tolist()[1]] = (
        torch.nan
    )
    before = {name: value.clone() for name, value in ours.policy.model.state_dict().items()}
    with pytest.raises(
        TrainingError,
        match="step 3, epoch 0, mini-batch 0: the loss is nan, so nothing was updated",
    ):
        ours.update(rows.replace(**{where: tensor}), step=3)
    assert all(
        torch.equal(value, before[name]) for name, value in ours.policy.model.state_dict().items()
    )


def test_a_sampler_that_disagrees_is_refused() -> None:
    ours = learner(policy(), algorithm(), max_gap=0.01)
    before = {name: value.clone() for name, value in ours.policy.model.state_dict().items()}
    with pytest.raises(TrainingError, match="sampler and trainer disagree"):
        ours.update(ready(ours), step=0)
    assert all(
        torch.equal(value, before[name]) for name, value in ours.policy.model.state_dict().items()
    )


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_critic_warmup_leaves_the_policy_alone(critic: str) -> None:
    ours = learner(policy(critic=critic), algorithm(), critic_warmup=1, critic_lr=0.01, lr=0.01)
    before = {name: value.clone() for name, value in ours.policy.model.state_dict().items()}
    heads = [parameter.detach().clone() for parameter in ours.policy.critic_parameters()]
    ours.update(ready(ours), step=0)
    assert all(
        torch.equal(value, before[name]) for name, value in ours.policy.model.state_dict().items()
    )
    assert any(
        not torch.equal(a, b) for a, b in zip(heads, ours.policy.critic_parameters(), strict=True)
    )
    ours.update(ready(ours), step=1)
    assert any(
        not torch.equal(value, before[name])
        for name, value in ours.policy.model.state_dict().items()
    )


@pytest.mark.parametrize("tokens", [10_000, 20])
def test_scoring_gives_log_probs_and_entropies_of_one_pass(tokens: int) -> None:
    ours = learner(policy(critic=None), algorithm("grpo"), micro_batch_tokens=tokens)
    rows = batch()
    assert ours.score(rows, old_logprobs=False).entropies is None
    with torch.no_grad():
        expected = ours.policy.score(rows)
    found = ours.score(rows, old_logprobs=True)
    torch.testing.assert_close(found.old_logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.entropies, expected.entropies, rtol=1e-4, atol=1e-5)
    assert expected.entropies[rows.response_mask].min() > 0


def test_target_kl_stops_the_remaining_updates() -> None:
    ours = learner(policy(critic=None), algorithm("grpo"), epochs=4, lr=0.05, target_kl=1e-6)
    rows = ours.score(batch(), old_logprobs=True)
    metrics = ours.update(compute_advantages(rows, ours.algorithm)[0], step=0)
    assert metrics["train/kl_stop"] == 1.0
    assert metrics["train/updates"] == 1.0


def test_the_adaptive_kl_coefficient_follows_its_target() -> None:
    ours = learner(policy(critic=None), algorithm("grpo", kl_coef=0.1, kl_target=0.01))
    ours.adapt_kl(1.0, num_episodes=1000)
    assert ours.algorithm.kl_coef == ours.kl.coef > 0.1


def test_an_environment_that_draws_from_the_global_generator_changes_no_update() -> None:
    pytest.importorskip("peft")
    found: list[torch.Tensor] = []
    for foreign in (1, 2):
        lora = LoraConfig(rank=2, dropout=0.5)
        model = add_lora(prepare(tiny_model()), lora, seed=0)
        ours = learner(Policy(model, tiny_tokenizer(), precision=CPU), algorithm("grpo"))
        rows = ready(ours)
        torch.manual_seed(foreign)  # as an environment may during the rollout
        ours.update(rows, step=3)
        found.append(torch.cat([p.detach().flatten() for p in ours.policy.parameters()]))
    assert torch.equal(*found)
