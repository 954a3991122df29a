"""From data paths to examples."""
