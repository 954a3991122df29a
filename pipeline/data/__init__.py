"""Conversion of files and Hub data sets to batches of token ids with loss masks."""
