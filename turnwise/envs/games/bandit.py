"""A one-turn bandit with two arms: a certain small reward, or a rare large one. The optimum is
known, so learning can be verified."""

from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

# (steady, daring): which of the two pays rarely but well is for the policy to find out.
_TRAIN_ARMS = (
    ("Clerk", "Diver"),
    ("Baker", "Pirate"),
    ("Tailor", "Explorer"),
    ("Gardener", "Gambler"),
    ("Librarian", "Inventor"),
    ("Miller", "Smuggler"),
    ("Weaver", "Stuntman"),
    ("Archivist", "Prospector"),
)
_VAL_ARMS = (
    ("Potter", "Corsair"),
    ("Postman", "Acrobat"),
    ("Notary", "Adventurer"),
    ("Cobbler", "Daredevil"),
)


class Bandit(BaseEnv):
    """One choice between a steady arm that pays `low` and a daring one that pays `high` with
    probability `chance`.

    The instance (names, their order, the day) comes from the seed, so the members of a group read
    the same prompt; the draw comes from `noise_seed`. The daring arm is best where chance * high >
    low, as by default.

    Example:
        >>> env = Bandit()
        >>> print(env.reset(seed=1))
        Day 1446. Who works for you today: Diver or Clerk?
        >>> env.best_action, env.optimum
        ('Diver', 0.25)
        >>> env.step("Clerk")[1]
        0.15
    """

    max_turns = 1

    def __init__(
        self,
        *,
        low: float = 0.15,
        high: float = 1.0,
        chance: float = 0.25,
        arms: tuple[str, str] | None = None,
    ) -> None:
        """`arms` names the steady and the daring arm; None: they come from the seed, others for
        validation."""
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"chance is a probability, got {chance}")
        if arms is not None and (len(arms) != 2 or arms[0].casefold() == arms[1].casefold()):
            raise ValueError(f"arms are two different names, got {arms}")
        self.low, self.high, self.chance = low, high, chance
        self.instruction = (
            "Two people offer to work for you. Choose the one who earns you more on average."
        )
        self._arms = arms
        self._steady = self._daring = ""
        self._noise = Random(0)

    @property
    def optimum(self) -> float:
        """The expected reward of the best arm."""
        return max(self.low, self.chance * self.high)

    @property
    def best_action(self) -> str:
        return self._daring if self.chance * self.high > self.low else self._steady

    def reset(
        self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train", **kwargs: Any
    ) -> str:
        refuse_keywords(kwargs, name="bandit")
        rng = Random(derive_seed(seed or 0, f"bandit/{split}"))
        pairs = _TRAIN_ARMS if split == "train" else _VAL_ARMS
        self._steady, self._daring = rng.choice(pairs) if self._arms is None else self._arms
        shown = [self._steady, self._daring]
        rng.shuffle(shown)
        day = 2 * rng.randrange(1000) + (split != "train")  # even days are for training
        self.actions = (shown[0], shown[1])
        self._noise = Random(derive_seed(seed or 0, "bandit/pay", noise_seed))
        return f"Day {day}. Who works for you today: {shown[0]} or {shown[1]}?"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action == self._steady:
            reward = self.low
        elif action == self._daring:
            reward = self.high if self._noise.random() < self.chance else 0.0
        else:
            raise ValueError(f"{action!r} is neither {self._steady!r} nor {self._daring!r}")
        best = action == self.best_action
        return f"{action} earned you {reward:g}.", reward, True, {"success": best, "best": best}
