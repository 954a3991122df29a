"""The embedded task: rows, verifier and tiny model of a run without data or downloads."""
