"""AdamW over a flat vector in one pass over memory."""
