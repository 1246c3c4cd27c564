"""Presets, knobs that are refused, KL and its controller, group filters."""

from typing import get_args

import pytest
import torch
from algo_batches import make_batch

from turnwise.algos import (
    PRESETS,
    KLState,
    build_algorithm,
    dr_grpo,
    filter_groups,
    grpo,
    kl_estimate,
    kl_rewards,
    rloo,
    update_kl,
)
from turnwise.config.schema import AlgoConfig, AlgorithmName
from turnwise.log.doctor import GROUP_RELATIVE


def test_every_name_has_a_preset_of_that_name() -> None:
    assert set(PRESETS) == set(get_args(AlgorithmName))
    for name in PRESETS:
        assert build_algorithm(AlgoConfig(name=name)).name == name


def test_the_doctor_knows_which_algorithms_compare_groups() -> None:
    assert set(GROUP_RELATIVE) == {name for name, p in PRESETS.items() if p.compares_groups}


def test_an_unknown_keyword_of_a_group_estimator_is_refused() -> None:
    ones = torch.ones(2, 1)
    for estimator in (grpo, dr_grpo, rloo):
        with pytest.raises(TypeError, match="episode_id"):
            estimator(ones, ones, group_ids=torch.tensor([0, 0]), episode_id=torch.tensor([0, 1]))


def test_defaults_leave_the_preset_as_it_is() -> None:
    for name, preset in PRESETS.items():
        built = build_algorithm(AlgoConfig(name=name))
        for field in (
            "advantage",
            "ratio_level",
            "surrogate",
            "reduction",
            "whiten",
            "clip_low",
            "clip_high",
            "filter",
        ):
            assert getattr(built, field) == getattr(preset, field), (name, field)


def test_what_they_need() -> None:
    needs = {name: (p.needs_critic, p.needs_groups) for name, p in PRESETS.items()}
    assert {name for name, (critic, _) in needs.items() if critic} == {
        "ppo",
        "bi_level_gae",
        "turn_gae",
    }
    assert {name for name, (_, groups) in needs.items() if not groups} == {
        "ppo",
        "bi_level_gae",
        "turn_gae",
        "reinforce_pp",
    }
    assert build_algorithm(
        AlgoConfig(name="ppo", filter="variance_top_p", filter_keep=0.9)
    ).needs_groups
    assert build_algorithm(AlgoConfig(name="ppo", kl_coef=0.1)).needs_reference


def test_the_config_refines_the_preset() -> None:
    built = build_algorithm(
        AlgoConfig(
            name="bi_level_gae",
            lam=0.9,
            surrogate="cispo",
            ratio_level="sequence",
            clip_high=0.5,
            whiten=False,
        )
    )
    assert (built.surrogate, built.ratio_level, built.clip_high, built.whiten) == (
        "cispo",
        "sequence",
        0.5,
        False,
    )
    assert built.high_level_lam == 0.9  # lam, where it is not given
    assert build_algorithm(AlgoConfig(lam=0.9, high_level_lam=0.5)).high_level_lam == 0.5


@pytest.mark.parametrize(
    ("algo", "knob"),
    [
        ({"name": "grpo", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in"),
        ({"name": "grpo", "gamma": 0.9}, "gamma"),
        ({"name": "rloo", "lam": 0.9}, "lam"),
        ({"name": "turn_gae", "gamma": 0.9}, "gamma"),
        ({"name": "ppo", "high_level_gamma": 0.5}, "high_level_gamma"),
        ({"name": "ppo", "high_level_lam": 0.5}, "high_level_lam"),
        ({"name": "turn_gae", "turn_value": "first"}, "turn_value"),
        ({"name": "ppo", "last_token": "add"}, "last_token"),
        ({"name": "grpo", "gigpo_weight": 0.5}, "gigpo_weight"),
        ({"name": "gigpo", "hgpo_history": 4}, "hgpo_history"),
        ({"name": "hgpo", "gigpo_std": False}, "gigpo_std"),
        ({"name": "grpo", "value_clip": 0.5}, "value_clip"),
        ({"name": "rloo", "clip_high": 0.3}, "clip_high"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"name": "ppo", "kl_target": 0.1}, "kl_target"),
        ({"name": "ppo", "filter_keep": 0.5}, "filter_keep"),
    ],
)
def test_a_knob_that_turns_nothing_is_refused_by_name(algo, knob) -> None:
    with pytest.raises(
        ValueError, match=rf"algo\.{knob}=.* means nothing to algo\.name='{algo['name']}'"
    ):
        build_algorithm(AlgoConfig.model_validate(algo))


def test_kl_estimates_agree_in_expectation() -> None:
    """k1 and k3 are unbiased: over a whole vocabulary their mean is the KL itself; k2 is close for
    small ones."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.float64).log_softmax(-1)
    reference = (
        policy + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64)
    ).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    for form, tolerance in (("k1", 1e-12), ("k3", 1e-12), ("k2", 0.1 * exact)):
        found = float((policy.exp() * kl_estimate(policy, reference, form=form)).sum())
        assert found == pytest.approx(exact, abs=tolerance)
    assert (kl_estimate(policy, reference, form="k3") >= 0).all()


def test_kl_rewards_are_negative_and_lie_on_the_response() -> None:
    batch = make_batch([[(2, 1.0)], [(3, 0.0)]])
    reference = torch.where(batch.response_mask, batch.logprobs - 0.5, torch.nan)
    rewards, mean = kl_rewards(batch.replace(ref_logprobs=reference), coef=0.1, form="k1")
    torch.testing.assert_close(rewards, torch.where(batch.response_mask, -0.05, 0.0))
    assert mean == pytest.approx(0.5)
    with pytest.raises(ValueError, match="ref_logprobs"):
        kl_rewards(batch, coef=0.1, form="k1")


def test_the_kl_coefficient_follows_its_target() -> None:
    state = KLState(coef=0.1, target=0.02, horizon=100)
    # At most 20 % per horizon.
    assert update_kl(state, kl=0.2, num_episodes=50).coef == pytest.approx(0.1 * 1.1)
    assert update_kl(state, kl=0.0, num_episodes=50).coef == pytest.approx(0.1 * 0.9)
    assert update_kl(state, kl=0.02, num_episodes=50).coef == pytest.approx(0.1)
    fixed = KLState(coef=0.1, target=None)
    assert update_kl(fixed, kl=9.0, num_episodes=50) == fixed


def groups_of(pairs: list[tuple[float, float]]):
    """Groups of two episodes with these rewards; unbiased std of a pair is their distance /
    sqrt(2)."""
    rows = [[(2, reward)] for pair in pairs for reward in pair]
    return make_batch(rows, groups=[i // 2 for i in range(len(rows))])


def kept(pairs, **algo) -> tuple[list[int], dict[str, float]]:
    rows, metrics = filter_groups(
        groups_of(pairs), build_algorithm(AlgoConfig.model_validate({"name": "grpo", **algo}))
    )
    return rows.tolist(), metrics


PAIRS = [(0.0, 1.0), (1.0, 1.0), (0.0, 6.0), (0.0, 3.0)]  # scores 1 0 6 3 (times 1 / sqrt 2)


def test_filters() -> None:
    assert kept(PAIRS)[0] == list(range(8))
    rows, metrics = kept(PAIRS, filter="dynamic")
    assert rows == [0, 1, 4, 5, 6, 7]
    assert metrics["filter/groups"] == 4
    assert metrics["filter/dropped_groups"] == 1
    assert metrics["filter/zero_variance_groups"] == 1
    assert kept(PAIRS, filter="variance_top_p", filter_keep=0.6)[0] == [4, 5]  # 6 of 10
    assert kept(PAIRS, filter="variance_top_p", filter_keep=0.61)[0] == [4, 5, 6, 7]
    assert kept(PAIRS, filter="variance_top_p", filter_keep=1.0)[0] == [0, 1, 4, 5, 6, 7]
    assert kept(PAIRS, filter="variance_top_k", filter_keep=0.25)[0] == [4, 5]
    assert kept(PAIRS, filter="variance_top_k", filter_keep=0.5)[0] == [4, 5, 6, 7]
    assert kept(PAIRS, filter="variance_top_k", filter_keep=1.0)[0] == list(range(8))


def test_dapo_filters_unasked() -> None:
    assert kept(PAIRS, name="dapo")[0] == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["dynamic", "variance_top_p"])
def test_all_dropped_is_an_empty_index(name) -> None:
    rows, metrics = kept([(0.1, 0.1), (0.0, 0.0)], filter=name)
    assert rows == []
    assert metrics["filter/dropped_groups"] == 2


def test_the_filter_counts_an_episode_once() -> None:
    """Four rows, two episodes with the same return: nothing to learn, though the rows differ."""
    batch = make_batch(
        [[(1, 1.0)], [(1, 0.0)], [(1, 1.0)]], episodes=[0, 0, 1], first_turns=[0, 1, 0]
    )
    rows, _ = filter_groups(batch, build_algorithm(AlgoConfig(name="grpo", filter="dynamic")))
    assert rows.tolist() == []
