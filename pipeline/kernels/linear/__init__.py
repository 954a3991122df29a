"""Linear layers of few rows, with the bits of products of many."""
