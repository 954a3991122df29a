"""The next token of each sequence, and its log-probability."""
