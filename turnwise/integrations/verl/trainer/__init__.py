"""verl's PPO trainer with our generation step, credit, pace of updates and run directory."""
