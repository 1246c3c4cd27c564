"""Credit assignment, surrogates, reductions, KL and group filters as pure functions on tensors; one
file per algorithm. No models, no training loop."""

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.bi_level_gae import compute_bi_level_gae_advantage_return
from turnwise.algos.credit import compute_advantages
from turnwise.algos.dr_grpo import dr_grpo
from turnwise.algos.filters import filter_groups
from turnwise.algos.gigpo import gigpo
from turnwise.algos.grpo import grpo
from turnwise.algos.hgpo import hgpo
from turnwise.algos.kl import KLState, kl_estimate, kl_rewards, update_kl
from turnwise.algos.losses import policy_loss, value_loss
from turnwise.algos.normalize import RewardNormalizer, normalize_rewards
from turnwise.algos.ppo import token_gae
from turnwise.algos.reduce import token_weights
from turnwise.algos.reinforce_pp import reinforce_pp
from turnwise.algos.rloo import rloo
from turnwise.algos.rounding import masked_whiten
from turnwise.algos.table import PRESETS, build_algorithm
from turnwise.algos.turn_gae import turn_gae

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
    "hgpo",
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
