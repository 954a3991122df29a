"""Step 3: reinforcement learning against the reward model with PPO."""
