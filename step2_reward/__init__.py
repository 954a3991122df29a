"""Step 2: train a reward model on pairs of responses or on labels."""
