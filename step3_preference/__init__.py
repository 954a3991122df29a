"""Step 3 without RL: trains the actor on preferences, by DPO and its family."""
