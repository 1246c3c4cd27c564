"""Algorithm: credit assignment, surrogate and reduction. Each algorithm has a file of its name in
this folder; table.py lists them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "policy_gradient"]
Reduction = Literal["token_mean", "episode_mean", "sequence_mean", "token_sum_norm"]
KLForm = Literal["k1", "k2", "k3"]
Filter = Literal["none", "variance_top_p", "variance_top_k", "dynamic"]

Estimate = tuple[Tensor, Tensor, dict[str, float]]
"""Advantages and returns, [B, T] each, and metrics of this estimator alone."""
Estimator = Callable[[Batch, "Algorithm", Tensor], Estimate]
"""Called with the whole batch, the algorithm and the rewards per token, [B, T]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Everything that turns a batch into a loss, and nothing that runs: no loops, no devices.

    Example:
        >>> from turnwise.algos.dapo import DAPO as dapo
        >>> dapo.advantage, dapo.clip_low, dapo.clip_high
        ('grpo', 0.2, 0.28)
        >>> dapo.reduction, dapo.filter, dapo.needs_critic
        ('token_mean', 'dynamic', False)
    """

    name: str
    advantage: str
    """The estimator's name."""
    estimator: Estimator
    settings: frozenset[str] = frozenset()
    """The settings that it reads, among gamma, lam, high_level_gamma, high_level_lam, turn_value,
    last_token, and those that begin with gigpo_ and hgpo_."""
    needs_critic: bool = False
    """The estimator reads values."""
    compares_groups: bool = False
    """The estimator compares an episode with others that started from the same state."""
    uses_token_rewards: bool = False
    """The estimator accepts per-token rewards, such as a KL penalty."""
    ratio_level: RatioLevel = "token"
    """token: one importance ratio per token. sequence: their geometric mean over the row's trained
    tokens (GSPO)."""
    surrogate: str = "clip"
    """clip: PPO's clipped objective. cispo: a clipped, constant weight on log-prob.
    policy_gradient: no clipping. Any other name is that of `loss`."""
    loss: Callable[..., Tensor] | None = None
    """A user's own loss of a token, in the surrogate's place (algos/own.py)."""
    reduction: Reduction = "token_mean"
    norm_tokens: float = AlgoConfig.model_fields["norm_tokens"].default
    """Divisor of token_sum_norm."""
    gamma: float = 1.0
    lam: float = 1.0
    high_level_gamma: float = 0.95
    high_level_lam: float = 1.0
    turn_value: Literal["last", "first"] = "last"
    last_token: Literal["replace", "add"] = "replace"
    whiten: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    value_clip: float | None = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_form: KLForm = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: float | None = None
    tis_cap: float | None = None
    singleton: Literal["error", "zero"] = "error"
    penalty_only_groups: Literal["drop", "train"] = "drop"
    """Read where the estimator compares groups (data/penalties.py)."""
    filter: Filter = "none"
    filter_keep: float = 1.0
    gigpo_weight: float = 1.0
    gigpo_std: bool = True
    hgpo_history: int = 2
    hgpo_alpha: float = 1.0
    hgpo_std: bool = True
    hgpo_episode: bool = False

    @property
    def needs_reference(self) -> bool:
        """True where the reference policy's log-probs are read."""
        return self.kl_coef > 0.0

    @property
    def needs_groups(self) -> bool:
        """True where the estimator or the filter compares an episode with its group."""
        return self.compares_groups or self.filter != "none"
