"""Autotuning: short timed trials of the real steps find the fastest settings (docs/scaling.md)."""
