"""A run: its steps in order, and the code that steps share."""
