"""Conversion of data paths to examples."""
