"""Step 3 without RL: training of the actor on preferences, by DPO and related methods."""
