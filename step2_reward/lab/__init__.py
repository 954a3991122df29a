"""Measurement of the quality and reliability of a reward model."""
