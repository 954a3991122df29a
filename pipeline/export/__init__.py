"""Models in the formats of other programs, each verified after it was written."""
