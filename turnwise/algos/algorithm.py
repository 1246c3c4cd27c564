"""Algorithm: how credit is assigned, the surrogate, how it is reduced. A preset per name, refined by the config."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from turnwise.config.schema import AlgoConfig, AlgorithmName

AdvantageName = Literal["token_gae", "bi_level_gae", "turn_gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "gigpo"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "cispo", "policy_gradient"]
Reduction = Literal["token_mean", "episode_mean", "sequence_mean", "token_sum_norm"]
KLForm = Literal["k1", "k2", "k3"]
Filter = Literal["none", "variance_top_p", "variance_top_k", "dynamic"]

_CRITIC: frozenset[AdvantageName] = frozenset({"token_gae", "bi_level_gae", "turn_gae"})
_GROUPS: frozenset[AdvantageName] = frozenset({"grpo", "dr_grpo", "rloo", "gigpo"})
_TOKEN_REWARDS: frozenset[AdvantageName] = frozenset({"token_gae", "bi_level_gae", "turn_gae", "reinforce_pp", "rloo"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """Everything that turns a batch into a loss, and nothing that runs: no loops, no devices.

    Example:
        >>> dapo = build_algorithm(AlgoConfig(name="dapo"))
        >>> dapo.advantage, dapo.clip_low, dapo.clip_high, dapo.reduction, dapo.filter, dapo.needs_critic
        ('grpo', 0.2, 0.28, 'token_mean', 'dynamic', False)
    """

    name: AlgorithmName
    advantage: AdvantageName
    """The estimator (algos/estimators.py)."""
    ratio_level: RatioLevel = "token"
    """token: one importance ratio per token. sequence: their geometric mean over the row's trained tokens (GSPO)."""
    surrogate: Surrogate = "clip"
    """clip: PPO's minimum of two. cispo: a clipped, constant weight on log-prob. policy_gradient: nothing clipped."""
    reduction: Reduction = "token_mean"
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
    filter: Filter = "none"
    filter_keep: float = 1.0
    gigpo_weight: float = 1.0

    @property
    def needs_critic(self) -> bool:
        """True where the estimator reads values."""
        return self.advantage in _CRITIC

    @property
    def needs_reference(self) -> bool:
        """True where the reference policy's log-probs are read."""
        return self.kl_coef > 0.0

    @property
    def needs_groups(self) -> bool:
        """True where an episode is compared with others that started from the same state."""
        return self.advantage in _GROUPS or self.filter != "none"

    @property
    def uses_token_rewards(self) -> bool:
        """True where the estimator can take rewards of single tokens, such as a KL penalty."""
        return self.advantage in _TOKEN_REWARDS


PRESETS: dict[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(name="ppo", advantage="token_gae", whiten=True),
    "bi_level_gae": Algorithm(name="bi_level_gae", advantage="bi_level_gae", whiten=True),
    "turn_gae": Algorithm(name="turn_gae", advantage="turn_gae", whiten=True),
    "grpo": Algorithm(name="grpo", advantage="grpo", reduction="episode_mean"),
    "dr_grpo": Algorithm(name="dr_grpo", advantage="dr_grpo", reduction="token_sum_norm"),
    "dapo": Algorithm(name="dapo", advantage="grpo", clip_high=0.28, filter="dynamic"),
    "rloo": Algorithm(name="rloo", advantage="rloo", surrogate="policy_gradient", reduction="token_sum_norm"),
    "reinforce_pp": Algorithm(name="reinforce_pp", advantage="reinforce_pp", whiten=True),
    "gigpo": Algorithm(name="gigpo", advantage="gigpo", reduction="episode_mean"),
    "gspo": Algorithm(
        name="gspo",
        advantage="grpo",
        ratio_level="sequence",
        reduction="sequence_mean",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    "cispo": Algorithm(name="cispo", advantage="grpo", surrogate="cispo", clip_low=1.0, clip_high=4.0),
}
"""What each paper proposes; docs/algorithms.md says which and where we differ."""


def build_algorithm(cfg: AlgoConfig) -> Algorithm:
    """The preset that the config names, refined by the config's other settings.

    A setting that the algorithm cannot honour is refused by name, so that nobody tunes a knob that turns nothing.

    Raises:
        ValueError: two settings contradict each other.

    Example:
        >>> build_algorithm(AlgoConfig(name="ppo", clip_high=0.28, reduction="episode_mean")).clip_high
        0.28
        >>> build_algorithm(AlgoConfig(name="grpo", kl_coef=0.1, kl_in="reward"))
        Traceback (most recent call last):
            ...
        ValueError: algo.kl_in='reward' means nothing to algo.name='grpo': ...
    """
    preset = PRESETS[cfg.name]
    chosen: dict[str, Any] = {}
    for spec in fields(Algorithm):
        if spec.name in AlgoConfig.model_fields and spec.name != "name":
            chosen[spec.name] = getattr(cfg, spec.name)
    if cfg.filter == "none":  # the config cannot say less than the preset: that would be another algorithm
        chosen["filter"] = preset.filter
    if cfg.high_level_lam is None:
        chosen["high_level_lam"] = cfg.lam
    optional = ("whiten", "clip_low", "clip_high", "dual_clip", "reduction", "tis_cap", "surrogate", "ratio_level")
    for name in optional:
        if chosen[name] is None:
            chosen[name] = getattr(preset, name)
    algorithm = replace(preset, **chosen)
    _refuse_idle_settings(cfg, algorithm)
    return algorithm


def _refuse_idle_settings(cfg: AlgoConfig, algorithm: Algorithm) -> None:
    """Raises ValueError for the first setting that differs from its default and would change nothing."""
    kind = algorithm.advantage
    turns = kind in ("bi_level_gae", "turn_gae")
    rules: list[tuple[str, bool, str]] = [
        ("gamma", kind in ("token_gae", "bi_level_gae", "reinforce_pp"), "its estimator has no token-level discount"),
        ("lam", algorithm.needs_critic, "its estimator has no lambda"),
        ("high_level_gamma", turns or kind == "gigpo", "its estimator has no turn-level discount"),
        ("high_level_lam", turns, "its estimator has no turn-level lambda"),
        ("turn_value", kind == "bi_level_gae", "only bi-level GAE chooses a turn's value"),
        ("last_token", kind == "bi_level_gae", "only bi-level GAE has a rule for a turn's last token"),
        ("gigpo_weight", kind == "gigpo", "only GiGPO has a step advantage to weigh"),
        ("value_clip", algorithm.needs_critic, "it has no critic"),
        ("value_coef", algorithm.needs_critic, "it has no critic"),
        ("clip_low", algorithm.surrogate != "policy_gradient", "its surrogate clips nothing"),
        ("clip_high", algorithm.surrogate != "policy_gradient", "its surrogate clips nothing"),
        ("dual_clip", algorithm.surrogate == "clip", "only the clip surrogate has a dual clip"),
        ("kl_in", cfg.kl_coef == 0.0 or algorithm.uses_token_rewards, "its estimator cannot use rewards of tokens"),
        ("kl_target", cfg.kl_coef > 0.0, "algo.kl_coef is 0, so there is nothing to adapt; set where it starts"),
        ("filter_keep", algorithm.filter in ("variance_top_p", "variance_top_k"), "no variance filter is on"),
    ]
    for name, used, why in rules:
        value, default = getattr(cfg, name), AlgoConfig.model_fields[name].default
        if not used and value != default:
            raise ValueError(
                f"algo.{name}={value!r} means nothing to algo.name={cfg.name!r}: {why}; "
                f"remove it or set it to {default!r}"
            )
