"""The report of a run: an HTML file that shows whether the model improved."""
