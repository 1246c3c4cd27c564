"""Playing episodes: plans, environment states, agents, contexts, and the loops (proxy, sync). No
tensors except the final Batch, no training.
"""
