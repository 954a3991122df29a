"""Step 2: a reward model from pairs of responses."""
