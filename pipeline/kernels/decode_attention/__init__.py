"""Attention of one new token of each sequence to the cache."""
