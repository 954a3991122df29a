"""Models in the formats of other programs, each verified after writing."""
