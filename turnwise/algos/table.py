"""The algorithms by name, and how a config refines one."""

from dataclasses import fields, replace
from typing import Any, get_args

from turnwise.algos.algorithm import Algorithm, Surrogate
from turnwise.algos.bi_level_gae import BI_LEVEL_GAE
from turnwise.algos.cispo import CISPO
from turnwise.algos.dapo import DAPO
from turnwise.algos.dr_grpo import DR_GRPO
from turnwise.algos.gigpo import GIGPO
from turnwise.algos.grpo import GRPO
from turnwise.algos.gspo import GSPO
from turnwise.algos.hgpo import HGPO
from turnwise.algos.own import LOSS_ARGUMENTS, own_algorithm, own_loss
from turnwise.algos.ppo import PPO
from turnwise.algos.reinforce_pp import REINFORCE_PP
from turnwise.algos.rloo import RLOO
from turnwise.algos.turn_gae import TURN_GAE
from turnwise.config.schema import AlgoConfig, Config
from turnwise.user_code import wanted_arguments

PRESETS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        *(PPO, BI_LEVEL_GAE, TURN_GAE, GRPO, DR_GRPO, DAPO, RLOO, REINFORCE_PP),
        *(GIGPO, HGPO, GSPO, CISPO),
    )
}
"""The presets follow the papers; docs/algorithms.md lists them and our differences."""


def build_algorithm(cfg: AlgoConfig) -> Algorithm:
    """The preset that the config names, refined by the config's other settings.

    A setting that the algorithm cannot honour is refused by name, so a setting without effect is
    never silently accepted.

    Raises:
        ValueError: two settings contradict each other.

    Example:
        >>> build_algorithm(AlgoConfig(name="ppo", clip_high=0.28,
        ...     reduction="episode_mean")).clip_high
        0.28
        >>> build_algorithm(AlgoConfig(name="grpo", kl_coef=0.1, kl_in="reward"))
        Traceback (most recent call last):
            ...
        ValueError: algo.kl_in='reward' means nothing to algo.name='grpo': ...
    """
    preset = PRESETS[cfg.name] if cfg.name in PRESETS else own_algorithm(cfg.name)
    chosen: dict[str, Any] = {}
    for spec in fields(Algorithm):
        if spec.name in AlgoConfig.model_fields and spec.name != "name":
            chosen[spec.name] = getattr(cfg, spec.name)
    if (
        cfg.filter == "none"
    ):  # the config cannot say less than the preset: that would be another algorithm
        chosen["filter"] = preset.filter
    if cfg.high_level_lam is None:
        chosen["high_level_lam"] = cfg.lam
    optional = (
        "whiten",
        "clip_low",
        "clip_high",
        "dual_clip",
        "reduction",
        "tis_cap",
        "surrogate",
        "ratio_level",
        "penalty_only_groups",
    )
    for name in optional:
        if chosen[name] is None:
            chosen[name] = getattr(preset, name)
    algorithm = replace(preset, **chosen)
    if cfg.surrogate is not None:
        ours = cfg.surrogate in get_args(Surrogate)
        algorithm = replace(algorithm, loss=None if ours else own_loss(cfg.surrogate))
    _refuse_idle_settings(cfg, algorithm)
    return algorithm


def own_parts(config: Config) -> list[tuple[str, object]]:
    """(key, value) of the user's own parts that only the native trainer runs.

    Example:
        >>> own_parts(Config.model_validate({"algo": {"name": "mine.py:estimator"}}))
        [('algo.name', 'mine.py:estimator')]
    """
    surrogate, name = config.algo.surrogate, config.algo.name
    found: list[tuple[str, object, bool]] = [
        ("algo.name", name, name not in PRESETS),
        ("algo.surrogate", surrogate, surrogate not in (None, *get_args(Surrogate))),
        ("rollout.generator", config.rollout.generator, config.rollout.generator is not None),
        ("log.callbacks", config.log.callbacks, bool(config.log.callbacks)),
    ]
    return [(key, value) for key, value, own in found if own]


def _refuse_idle_settings(cfg: AlgoConfig, algorithm: Algorithm) -> None:
    """Raises ValueError for the first setting that differs from its default and would change
    nothing."""
    own = {
        "gamma": "its estimator has no token-level discount",
        "lam": "its estimator has no lambda",
        "high_level_gamma": "its estimator has no turn-level discount",
        "high_level_lam": "its estimator has no turn-level lambda",
        "turn_value": "only bi-level GAE chooses a turn's value",
        "last_token": "only bi-level GAE has a rule for a turn's last token",
        "gigpo_weight": "only GiGPO has a step advantage to weigh",
        "gigpo_std": "it is GiGPO's; dr_grpo is GRPO without the standard deviation",
        "hgpo_history": "only HGPO compares the states before a turn's own",
        "hgpo_alpha": "only HGPO weighs several comparisons of a turn",
        "hgpo_std": "it is HGPO's; dr_grpo is GRPO without the standard deviation",
        "hgpo_episode": "only HGPO compares turns without the episodes",
    }
    clips = {"clip_low", "clip_high"} if algorithm.surrogate != "policy_gradient" else set[str]()
    if algorithm.loss is not None:
        clips = wanted_arguments(algorithm.loss, dict.fromkeys(LOSS_ARGUMENTS))
    rules: list[tuple[str, bool, str]] = [
        *((name, name in algorithm.settings, why) for name, why in own.items()),
        ("value_clip", algorithm.needs_critic, "it has no critic"),
        ("value_coef", algorithm.needs_critic, "it has no critic"),
        ("clip_low", "clip_low" in clips, "its surrogate clips nothing"),
        ("clip_high", "clip_high" in clips, "its surrogate clips nothing"),
        ("dual_clip", algorithm.surrogate == "clip", "only the clip surrogate has a dual clip"),
        (
            "kl_in",
            cfg.kl_coef == 0.0 or algorithm.uses_token_rewards,
            "its estimator cannot use rewards of tokens",
        ),
        (
            "kl_target",
            cfg.kl_coef > 0.0,
            "algo.kl_coef is 0, so there is nothing to adapt; set where it starts",
        ),
        (
            "norm_tokens",
            algorithm.reduction == "token_sum_norm",
            "its reduction divides by no constant",
        ),
        ("penalty_only_groups", algorithm.compares_groups, "it compares no groups"),
        (
            "filter_keep",
            algorithm.filter in ("variance_top_p", "variance_top_k"),
            "no variance filter is on",
        ),
    ]
    for name, used, why in rules:
        value, default = getattr(cfg, name), AlgoConfig.model_fields[name].default
        if not used and value != default:
            raise ValueError(
                f"algo.{name}={value!r} means nothing to algo.name={cfg.name!r}: {why}; "
                f"remove it or set it to {default!r}"
            )
