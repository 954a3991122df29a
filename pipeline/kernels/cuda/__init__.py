"""CUDA kernels: own CUDA C++, compiled by the NVRTC that PyTorch brings, started by the driver."""
