"""The embedded task: rows, verifier and tiny model for runs without data or downloads."""
