"""Settings of the process and of the machine: threads, memory, rounding, random numbers."""
