"""Keys and values of new tokens into the slots of the cache."""
