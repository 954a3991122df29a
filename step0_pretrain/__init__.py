"""Step 0: continued pre-training on text."""
