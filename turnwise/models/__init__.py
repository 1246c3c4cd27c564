"""The networks: policy, critic, scoring, packing, attention, memory. Episodes are played in
rollout/ and updates made in train/."""
