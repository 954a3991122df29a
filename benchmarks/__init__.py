"""Side-by-side benchmarks against other libraries, one command each."""
