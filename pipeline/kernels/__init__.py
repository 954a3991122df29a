"""Memory-bound operators: defined in plain PyTorch, with custom kernels where they help."""
