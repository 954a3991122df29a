"""Collectives between the processes of an engine."""
