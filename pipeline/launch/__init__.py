"""Starting processes, on one machine or many."""
