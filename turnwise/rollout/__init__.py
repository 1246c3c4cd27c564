"""Who plays which episode: plans, environments' states, agents, contexts, and the loop that plays them (proxy, sync).
No tensors but the final Batch, no training.
"""
