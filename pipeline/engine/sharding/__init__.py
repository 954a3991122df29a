"""Units of a model as flat vectors: their shards, and their placement on a device or disk."""
