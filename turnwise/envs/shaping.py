"""Reward shaping. It is applied only here: environments never shape their own rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from turnwise.config.schema import ShapingConfig
from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_reward
from turnwise.types import StepResult


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlong:
    """Soft overlong punishment (DAPO, arXiv 2503.14476): replies of up to `limit - tokens` tokens
    lose nothing, one of `limit` tokens loses `penalty`, and in between it grows evenly.

    Example:
        >>> rule = Overlong(limit=100, tokens=20, penalty=0.5)
        >>> [rule.reward(length) for length in (80, 90, 100)]
        [0.0, -0.25, -0.5]
    """

    limit: int
    tokens: int
    penalty: float

    def reward(self, length: int) -> float:
        beyond = max(length - (self.limit - self.tokens), 0)
        return -self.penalty * beyond / self.tokens if beyond else 0.0

    def applied(self, result: StepResult, length: int) -> StepResult:
        """The result with the punishment in its reward."""
        added = self.reward(length)
        if not added:
            return result
        parts = {**(result.reward_parts or {"env": result.reward}), "overlong": added}
        return replace(result, reward=result.reward + added, reward_parts=parts)
