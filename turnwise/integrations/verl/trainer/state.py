"""State of a run that verl does not keep: KL coefficient, reward statistics, idle steps in a row,
evaluations.

It is stored beside verl's checkpoints.
"""

import json
from pathlib import Path

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.kl import KLState, update_kl
from turnwise.algos.normalize import RewardNormalizer
from turnwise.config.schema import Config
from turnwise.log.events import Evaluated
from turnwise.rollout.plan import env_configs
from turnwise.train.standstill import Standstill

FILE = "turnwise.json"
"""Its name in a checkpoint's folder."""


class RunState:
    """The part of a run that its driver adapts from step to step.

    Example:
        >>> from turnwise.algos.table import build_algorithm
        >>> config = Config(algo={"kl_coef": 0.1, "kl_target": 0.02})
        >>> state = RunState(config, build_algorithm(config.algo))
        >>> state.adapt_kl(0.04, num_episodes=1000)
        >>> round(state.kl.coef, 4)
        0.102
    """

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self.kl = KLState(coef=algorithm.kl_coef, target=algorithm.kl_target)
        environments = env_configs(config, config.rollout.train)
        self.normalizer = RewardNormalizer(
            {tag: env.shaping for tag, env in environments.items()}, singleton=algorithm.singleton
        )
        self.still = Standstill(config.train)
        self.evaluations: list[Evaluated] = []

    def adapt_kl(self, kl: float, *, num_episodes: int) -> None:
        """Moves the KL's coefficient towards its target, where it has one."""
        self.kl = update_kl(self.kl, kl=kl, num_episodes=num_episodes)

    def save(self, folder: Path) -> None:
        """Writes the state into a checkpoint's folder, before verl names that checkpoint the
        latest."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "kl_coef": self.kl.coef,
            "idle_steps": self.still.idle,
            "reward_statistics": self.normalizer.state_dict(),
            "evaluations": [event.to_json() for event in self.evaluations],
        }
        (folder / FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Loads the state that `save` wrote.

        Raises:
            ValueError: the folder holds none.
        """
        path = folder / FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} is no checkpoint of the verl backend: {FILE} is missing; start a new run"
            )
        state = json.loads(path.read_text(encoding="utf-8"))
        # A fixed coefficient is the config's, which a resumed run may have changed.
        coef = self.kl.coef if self.kl.target is None else state["kl_coef"]
        self.kl = KLState(coef=coef, target=self.kl.target)
        self.still.idle = state["idle_steps"]
        self.normalizer.load_state_dict(state["reward_statistics"])
        # A finished run that is extended is evaluated again at its new end.
        found = [Evaluated.from_json(event) for event in state["evaluations"]]
        self.evaluations = [event for event in found if event.label != "after"]
