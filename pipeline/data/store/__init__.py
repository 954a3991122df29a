"""Token files: a corpus as tokens, checksummed, read by memory map (docs/data_store.md)."""
