"""Monitoring of a job: positions of its processes, failures, losses, and slow ones."""
