"""The step, the update, the optimizer, checkpoints, the warm start, and the run around them."""

from turnwise.callable_module import make_callable

make_callable(__name__, "turnwise.api:train")
