"""The networks: policy, critic, scoring, packing, attention, memory. Nothing here plays or updates."""
