"""Environments, which respond to a model's turns and reward it, in worker processes."""
