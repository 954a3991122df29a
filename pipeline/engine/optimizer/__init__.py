"""From gradients to new weights: sums, norm, loss scale, masters, optimizer."""
