"""Environments, which respond to a model's turns and reward them, in worker processes."""
