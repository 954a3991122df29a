"""Forward passes over packed or padded batches, with per-token results for any model."""
