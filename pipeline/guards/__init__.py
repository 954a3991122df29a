"""Watches the metrics of a run: warns, stops the run, or rolls it back."""
