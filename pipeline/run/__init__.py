"""A run: its steps in order, and code that the steps share."""
