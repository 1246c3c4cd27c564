"""Every estimator that we ship passes the conformance suite: as a pure function, and through a
Batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from turnwise.algos import (
    PRESETS,
    build_algorithm,
    compute_advantages,
    compute_bi_level_gae_advantage_return,
    gigpo,
    grpo,
    hgpo,
    reinforce_pp,
    rloo,
    token_gae,
    turn_gae,
)
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch
from turnwise.testing.conformance import GAMMA, HIGH_LEVEL_GAMMA, LAM, check_estimator


def _token(r, v, m, gamma, lam, *, bootstrap):
    return token_gae(r, v, m, gamma=gamma, lam=lam, bootstrap=bootstrap)


def _turn(r, v, m, gamma, lam, *, bootstrap, turn_ids):
    return turn_gae(r, v, m, gamma=gamma, lam=lam, bootstrap=bootstrap, turn_ids=turn_ids)


def _first(r, v, m, gamma, lam, high_level_gamma, *, bootstrap, turn_ids):
    return compute_bi_level_gae_advantage_return(
        r,
        v,
        m,
        gamma,
        lam,
        high_level_gamma,
        bootstrap=bootstrap,
        turn_ids=turn_ids,
        turn_value="first",
    )


def _runs(r, v, m, gamma, lam, high_level_gamma, *, bootstrap):
    return compute_bi_level_gae_advantage_return(
        r, v, m, gamma, lam, high_level_gamma, bootstrap=bootstrap
    )


def _whitened(r, v, m, gamma, lam, high_level_gamma, *, bootstrap, turn_ids):
    return compute_bi_level_gae_advantage_return(
        r, v, m, gamma, lam, high_level_gamma, bootstrap=bootstrap, turn_ids=turn_ids, whiten=True
    )


def _grpo(r, v, m, gamma, lam, *, group_ids, episode_ids):
    return grpo(r, m, group_ids=group_ids, episode_ids=episode_ids)


def _rloo(r, v, m, gamma, lam, *, group_ids):
    return rloo(r, m, group_ids=group_ids)


def _reinforce_pp(r, v, m, gamma, lam):
    return reinforce_pp(r, m, gamma=gamma)


def _gigpo(r, v, m, gamma, lam, *, group_ids, state_ids, turn_ids):
    return gigpo(r, m, group_ids=group_ids, state_ids=state_ids, turn_ids=turn_ids, gamma=gamma)[:2]


def _hgpo(r, v, m, gamma, lam, *, group_ids, state_ids, turn_ids):
    return hgpo(
        r,
        m,
        group_ids=group_ids,
        state_ids=state_ids,
        turn_ids=turn_ids,
        gamma=gamma,
        with_episode=True,
    )[:2]


@pytest.mark.parametrize(
    ("estimator", "reference"),
    [
        (compute_bi_level_gae_advantage_return, "bi_level_gae"),
        (_runs, "bi_level_gae"),
        (_token, "token_gae"),
        (_turn, "turn_gae"),
        (_first, None),
        (_whitened, None),
        (_grpo, None),
        (_rloo, None),
        (_reinforce_pp, None),
        (_gigpo, None),
        (_hgpo, None),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_pure_functions(estimator, reference, seed) -> None:
    report = check_estimator(estimator, reference=reference, seed=seed).raise_if_failed()
    assert ("brute_force" in report.skipped) == (reference is None)


def through_a_batch(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """compute_advantages as an estimator of the suite's contract."""
    knobs = {
        "ppo": {"gamma": GAMMA, "lam": LAM},
        "bi_level_gae": {"gamma": GAMMA, "lam": LAM, "high_level_gamma": HIGH_LEVEL_GAMMA},
        "turn_gae": {"lam": LAM, "high_level_gamma": HIGH_LEVEL_GAMMA},
        "gigpo": {"high_level_gamma": HIGH_LEVEL_GAMMA},
        "hgpo": {"high_level_gamma": HIGH_LEVEL_GAMMA},
        "reinforce_pp": {"gamma": GAMMA},
    }
    algorithm = build_algorithm(AlgoConfig.model_validate({"name": name, **knobs.get(name, {})}))

    def estimator(rewards, values, mask, gamma, lam, *, turn_ids, state_ids, bootstrap, group_ids):
        rows = torch.arange(mask.shape[0])
        batch = Batch(
            input_ids=torch.zeros_like(turn_ids),
            attention_mask=torch.ones_like(turn_ids),
            response_mask=mask,
            loss_mask=mask,
            turn_ids=turn_ids,
            rewards=rewards,
            logprobs=torch.zeros_like(rewards),
            state_ids=state_ids,
            episode_ids=rows,
            group_ids=group_ids,
            truncated=bootstrap != 0,
            values=values,
            bootstrap=bootstrap,
        )
        scored, _ = compute_advantages(batch, algorithm)
        return scored.advantages, scored.returns

    return estimator


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_through_a_batch(name) -> None:
    report = check_estimator(through_a_batch(name), name=name)
    without_critic = not PRESETS[name].needs_critic
    # An estimator without a critic has no value to bootstrap from; it must fail that check and no
    # other.
    assert report.failures == (("bootstrap",) if without_critic else ()), str(report)
