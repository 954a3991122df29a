"""Settings of the process and the machine: threads, memory, rounding, random numbers."""
