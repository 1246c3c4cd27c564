"""The step, the update, the optimizer, checkpoints, the warm start, and the run around them."""
