"""Operators bound by memory: defined in plain PyTorch, with kernels of our own where they help."""
