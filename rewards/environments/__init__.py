"""Environments: what answers a model between its turns, in worker processes, and rewards it."""
