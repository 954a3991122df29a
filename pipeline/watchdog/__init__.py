"""Watching a job: where its processes are, who failed, who is gone, who is slow."""
