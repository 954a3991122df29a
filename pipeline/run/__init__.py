"""A run: its steps in order, and what each has in common."""
