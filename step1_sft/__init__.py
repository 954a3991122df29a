"""Step 1: supervised fine-tuning of the actor on demonstrations."""
