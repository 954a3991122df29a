"""The reward-model laboratory: how well a reward model does, and how far it can be trusted."""
