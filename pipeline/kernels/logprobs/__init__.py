"""Log-probabilities and entropies of given tokens."""
