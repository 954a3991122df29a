"""Durable writes, locks, tensors in files and their headers."""
