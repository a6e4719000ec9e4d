"""The CUDA kernel backend: one set of kernels, started by a library of nvcc or by CuPy."""
