"""Guards that watch the metrics of a run: they warn, stop the run, or roll it back."""
