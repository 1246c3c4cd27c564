"""Reward shaping. It is applied only here: environments never shape their own rewards."""

from collections.abc import Mapping

from turnwise.config.schema import ShapingConfig
from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_reward


def shaping_parts(
    parts: Mapping[str, float],
    shaping: ShapingConfig,
    *,
    before: float | None,
    after: float | None,
    name: str,
) -> dict[str, float]:
    """The shaping parts of a turn's reward, by name: a cost per turn, potential differences, and
    the part removed by clipping.

    `before` and `after` are the environment's potential before and after the turn; the added part
    is coef * (gamma * after - before), as in Ng, Harada and Russell (1999). The potential after the
    end is 0, so the discounted shaping of an episode is a constant of the initial state and does
    not change which policy is best. That holds if gamma is the discount between turns
    (algo.high_level_gamma of bi-level and turn-level GAE; 1 if returns are not discounted), and
    only without clipping.

    Example:
        >>> shaping = ShapingConfig(turn_cost=-0.1, potential_coef=0.5)
        >>> shaping_parts({"env": 1.0}, shaping, before=-1.0, after=-0.5, name="lake")
        {'turn_cost': -0.1, 'potential': 0.25}
    """
    added: dict[str, float] = {}
    if shaping.turn_cost:
        added["turn_cost"] = shaping.turn_cost
    if shaping.potential_coef:
        if before is None or after is None:
            raise EnvError(
                f"{name}: shaping.potential_coef needs a potential, the environment has none; set "
                "it to 0"
            )
        change = shaping.potential_gamma * after - before
        change = read_reward(change, name=name, what="a change of potential")
        added["potential"] = shaping.potential_coef * change
    if shaping.clip is not None:
        total = sum(parts.values()) + sum(added.values())
        added["clip"] = max(-shaping.clip, min(shaping.clip, total)) - total
    return added
