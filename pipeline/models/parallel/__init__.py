"""Models of which a process has a shard of each layer, or some of the blocks."""
