// The C interface of the library of CUDA kernels; kernels/cuda/interface.py has the same table for ctypes. A status is 0 or a cudaError_t.
// All functions mean the current device.
#pragma once
#include <stdint.h>

extern "C" {
// The kernel of that name, null if there is none.
const void* zipccl_cuda_kernel(const char* name);
// The number of the current device.
int32_t zipccl_cuda_device(int32_t* device);
// Loads a kernel, and allows launches with `shared` bytes of shared memory. CUDA otherwise loads kernels when they are first launched; then
// it waits for the device, which never ends beside a kernel that waits for another rank.
int32_t zipccl_cuda_load(const void* kernel, uint32_t shared);
// Puts a kernel with `params`, the struct that is its parameter, on a stream, as a grid of x times y blocks of threads; does not wait.
int32_t zipccl_cuda_start(const void* kernel, uint32_t x, uint32_t y, uint32_t threads, uint32_t shared, const void* params, void* stream);
// The words of a status.
const char* zipccl_cuda_error(int32_t status);
}
