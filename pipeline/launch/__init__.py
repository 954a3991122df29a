"""How processes are started, on one machine or many."""
