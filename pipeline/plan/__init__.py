"""The plan of a run, decided before anything runs."""
