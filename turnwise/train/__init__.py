"""The step, the update, the optimizer, checkpoints, the warm start, and the run around them.
Advantages and losses are in algos/, the episode loop in rollout/.
"""

from turnwise.callable_module import make_callable

make_callable(__name__, "turnwise.api:train")
