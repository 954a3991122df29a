"""Watches a run by its metrics, and warns, ends it, or takes it back."""
