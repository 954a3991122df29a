"""A GPU that is none: CUDA kernels on the CPU, thread by thread, every access checked."""
