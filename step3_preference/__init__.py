"""Step 3 without RL: the actor learns from preferences, by DPO and its family."""
