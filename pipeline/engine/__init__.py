"""The training engine, which hides devices, precision, optimizer and collectives from the loop."""
