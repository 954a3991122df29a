"""Monitoring of a job: positions of its processes, failures, lost and slow processes."""
