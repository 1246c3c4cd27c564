"""verl's trainer on Ray without a GPU: two PPO steps of multi-turn episodes, and what they must
prove."""

import math

import pytest
import torch

pytest.importorskip("verl")

from verl_parts import Outcome, tiny_config, trained

from turnwise.algos import build_algorithm, compute_advantages
from turnwise.config.schema import Config
from turnwise.data.batch import collate
from turnwise.data.samples import episode_to_samples
from turnwise.log.store import RunReader
from turnwise.rollout.plan import plan_rollout

pytestmark = [pytest.mark.verl, pytest.mark.timeout(700)]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReader, Outcome, Config]:
    folder = tmp_path_factory.mktemp("verl")
    config = tiny_config(folder, "eval.before=true", "train.packing=true")
    run, outcome = trained(folder, config)
    print(f"two steps took {outcome.seconds:.0f} s")
    return run, outcome, config


def _steps(run: RunReader) -> list[dict[str, float | None]]:
    return [row for row in run.metrics() if "rollout/reward" in row]


def test_weights_reach_the_engine(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    """At step 2 the engine samples with weights that changed in step 1, and the trainer finds the
    same probabilities"""
    first, second = _steps(two_steps[0])
    assert second["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert second["training/rollout_probs_diff_max"] < 1e-4
    assert second["train/gap_max"] < 1e-3
    assert first["actor/entropy"] != second["actor/entropy"]


def test_gradients_flow(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    for row in _steps(two_steps[0]):
        assert row["actor/grad_norm"] > 1e-3
        assert row["critic/grad_norm"] > 1e-3
        assert math.isfinite(row["actor/loss"])


def test_no_episode_failed(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    for row in _steps(two_steps[0]):
        assert row["rollout/failures"] == 0
        assert row["rollout/refilled_groups"] == 0
        assert row["rollout/episodes"] == 4


def test_episodes_are_the_native_plan(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    """Groups share task and seed, members differ in their tokens, and the tasks are those of a
    native run"""
    from turnwise.envs.registry import make_env

    run, _, config = two_steps
    for step in (0, 1):
        episodes = run.episodes(step)
        plans = plan_rollout(
            config, split="train", step=step, probes={"simple_game": make_env(config.env)}
        )
        assert [episode.task for episode in episodes] == [plan.task for plan in plans]
        assert [episode.seed for episode in episodes] == [plan.seed for plan in plans]
        assert episodes[0].task == episodes[1].task != episodes[2].task
        assert episodes[0].turns[0].completion.ids != episodes[1].turns[0].completion.ids
        assert [len(episode.turns) for episode in episodes] == [3, 3, 3, 3]
        assert min(episode.reset_start for episode in episodes) == 0.0  # sent by other processes
        assert all(
            turn.reward == pytest.approx(-0.1) for episode in episodes for turn in episode.turns
        )
        assert {
            turn.completion.policy_version for episode in episodes for turn in episode.turns
        } == {step}


def test_trained_tokens_are_sampled_tokens(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    run = two_steps[0]
    for step, entry in enumerate(run.ledger()):
        said = sum(
            len(turn.completion.ids) for episode in run.episodes(step) for turn in episode.turns
        )
        assert entry.broken == 0
        assert entry.sampled == entry.trained == said


def test_credit_is_what_the_native_estimator_gives(
    two_steps: tuple[RunReader, Outcome, Config],
) -> None:
    """From the stored episodes and the critic's stored values alone: rewards sit on the turns' last
    tokens, values reached the estimator, and truncated episodes bootstrap."""
    run, _, config = two_steps
    algorithm = build_algorithm(config.algo)
    for step in (0, 1):
        batch = collate(
            [sample for episode in run.episodes(step) for sample in episode_to_samples(episode)]
        )
        credit = run.credit(step)
        values, returns = torch.zeros_like(batch.rewards), torch.zeros_like(batch.rewards)
        advantages = torch.zeros_like(batch.rewards)
        bootstrap = torch.zeros(batch.num_rows)
        for row, given in enumerate(credit):
            mask = batch.response_mask[row]
            values[row, mask] = torch.tensor(given.values)
            returns[row, mask] = torch.tensor(given.returns)
            advantages[row, mask] = torch.tensor(given.advantages)
            last = int(mask.nonzero()[-1])
            # at the last token of the last turn: return = reward + high_level_gamma * value of the
            # state after it
            bootstrap[row] = (
                returns[row, last] - batch.rewards[row, last]
            ) / algorithm.high_level_gamma
        assert all(len(given.entropies) == len(given.turn_ids) for given in credit)
        assert min(min(given.entropies) for given in credit) > 0
        said = values[batch.response_mask].abs()
        assert batch.truncated.all()
        if step == 0:
            assert said.max() == 0, "a new critic says 0, as the native one"
        else:
            assert said.min() > 0
            assert bootstrap.abs().min() > 1e-4
        native, _ = compute_advantages(batch.replace(values=values, bootstrap=bootstrap), algorithm)
        torch.testing.assert_close(native.returns, returns, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(native.advantages, advantages, atol=1e-3, rtol=1e-3)


def test_validation_has_many_turns(two_steps: tuple[RunReader, Outcome, Config]) -> None:
    (row,) = [row for row in two_steps[0].metrics() if "eval/reward" in row]
    assert row["eval/turns"] == 3
    assert row["eval/reward"] == pytest.approx(-0.3)
    assert row["eval/failures"] == 0
    assert row["eval/episodes"] == 4
    assert row["eval/reward_low"] <= row["eval/reward"] <= row["eval/reward_high"]
    summary = two_steps[0].summary()
    assert (summary["steps"], summary["after"]) == (2, None)
    assert summary["before"]["episodes"] == 4
