"""Environments, in worker processes: they respond to a model's turns and reward it."""
