"""What a step takes on a machine, counted before anything is loaded."""
