"""Step 3: training of the actor on rewards or from a teacher, by PPO and related methods."""
