"""Kernels in C++, compiled at their first use by the compiler of the system."""
