"""The reward-model laboratory: quality and reliability of a reward model."""
