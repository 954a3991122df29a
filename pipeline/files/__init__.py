"""Files that stay whole: durable writes, locks, tensors and their headers."""
