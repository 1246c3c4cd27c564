"""verl's PPO trainer with our generation step, credit, pace of updates and run directory.
Episodes are played in ../rollout."""
