"""An environment of one's own on verl: the smallest task over three turns.

turnwise train --backend verl examples/verl_count.yaml
"""

from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv


class CountEnv(BaseEnv):
    """Pays, in every turn, the share of printable ASCII characters in the reply; over after `turns`
    turns.

    Example:
        >>> env = CountEnv(turns=2)
        >>> env.reset(seed=1)
        'say 2'
        >>> env.step("abc")[1:3], env.step("ab\\u00e9\\u00e9")[1:3]
        ((1.0, False), (0.5, True))
    """

    instruction = "Answer in plain characters."

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self._turn = 0
        self._rng = Random(0)

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        self._turn, self._rng = 0, Random(seed or 0)
        return self._text()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._turn += 1
        plain = sum(32 <= ord(character) < 127 for character in action)
        return self._text(), plain / max(1, len(action)), self._turn >= self.turns, {}

    def random_action(self, rng: Random) -> str:
        """What the embedded model imitates before training: half of it plain."""
        return "".join(rng.choice("abcd\u00e4\u00e9\u00f6\u00fc") for _ in range(4))

    def _text(self) -> str:
        return f"say {self._rng.randint(0, 9)}"
