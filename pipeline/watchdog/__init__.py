"""Monitoring of a job: positions of its processes, failures and lost processes."""
