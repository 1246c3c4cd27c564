"""Algorithms as pure functions on tensors: credit assignment, surrogates, reductions, KL and group filters."""

from turnwise.algos.advantages import compute_bi_level_gae_advantage_return, token_gae, turn_gae
from turnwise.algos.algorithm import PRESETS, Algorithm, build_algorithm
from turnwise.algos.estimators import compute_advantages
from turnwise.algos.filters import filter_groups
from turnwise.algos.groups import dr_grpo, gigpo, grpo, reinforce_pp, rloo
from turnwise.algos.kl import KLState, kl_estimate, kl_rewards, update_kl
from turnwise.algos.losses import policy_loss, value_loss
from turnwise.algos.normalize import RewardNormalizer, normalize_rewards
from turnwise.algos.reduce import token_weights
from turnwise.algos.rounding import masked_whiten

__all__ = [
    "PRESETS",
    "Algorithm",
    "KLState",
    "RewardNormalizer",
    "build_algorithm",
    "compute_advantages",
    "compute_bi_level_gae_advantage_return",
    "dr_grpo",
    "filter_groups",
    "gigpo",
    "grpo",
    "kl_estimate",
    "kl_rewards",
    "masked_whiten",
    "normalize_rewards",
    "policy_loss",
    "reinforce_pp",
    "rloo",
    "token_gae",
    "token_weights",
    "turn_gae",
    "update_kl",
    "value_loss",
]
