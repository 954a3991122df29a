"""Forward passes over packed or padded batches: per-token results of any model."""
