"""The process and the machine: errors, signals, logs, threads, memory, random numbers."""
