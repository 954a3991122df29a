"""What a run will do, decided before it does anything."""
