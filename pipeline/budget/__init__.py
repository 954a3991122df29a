"""Memory and time of a step on a machine, estimated before anything is loaded."""
