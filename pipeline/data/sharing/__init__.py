"""Which rows a step trains on and is evaluated on, and how steps stay apart by prompt."""
