"""The report of a run: one HTML file that shows whether the model got better."""
