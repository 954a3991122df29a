"""Side-by-side measurements against peers, one command each."""
