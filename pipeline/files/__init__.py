"""Durable writes, locks, tensor I/O and safetensors headers."""
