"""Units of a model as flat vectors: their shards, and their place on a device or disk."""
