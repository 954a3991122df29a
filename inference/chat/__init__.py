"""A dialogue in the terminal."""
