"""An environment for the tests of signals. Workers import it, so it needs nothing of the tests."""

import os
import subprocess
from typing import Any

from turnwise.envs.base import BaseEnv

STARTED = "TURNWISE_TEST_STARTED"


class Served(BaseEnv):
    """A guess, with a process beside it that never ends by itself."""

    instruction = "Guess."
    actions = ("up", "down")

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        if STARTED not in os.environ:  # once in a worker
            os.environ[STARTED] = "yes"
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self._right = self.actions[(seed or 0) % 2]
        return f"It is {self._right}, says number {(seed or 0) % 50}."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "So be it.", float(action == self._right), True, {"success": action == self._right}
