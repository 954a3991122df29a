"""Compiling kernels at their first use, keeping what comes out, and starting it."""
