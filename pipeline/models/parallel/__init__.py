"""Tensor parallelism and pipeline stages: a process has part of each layer, or some blocks."""
