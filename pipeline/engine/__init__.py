"""The training engine: what a loop sees of devices, precision, optimizer and collectives."""
