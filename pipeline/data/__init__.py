"""Read files and Hub data sets, and convert them to batches of token ids with loss masks."""
