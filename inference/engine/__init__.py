"""Generation: batches, the cache, decoding passes, sampling."""
