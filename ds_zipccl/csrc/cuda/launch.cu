// The kernels behind a plain C interface.
#include <string.h>

#include "cuda/kernels.cuh"

namespace {
struct Kernel {
  const char* name;
  const void* entry;
};
#define ZIPCCL_ENTRY(kernel, Params) {#kernel, reinterpret_cast<const void*>(kernel)},
const Kernel kKernels[] = {ZIPCCL_EACH_KERNEL(ZIPCCL_ENTRY)};
}  // namespace

// Puts a kernel with `params` (the type that ZIPCCL_EACH_KERNEL names) on a stream, on the current device, as a grid of x times y blocks of
// threads. Returns 0 or a cudaError_t.
extern "C" int32_t zipccl_cuda_launch(const char* name, uint32_t x, uint32_t y, uint32_t shared, const void* params, void* stream) {
  for (const Kernel& kernel : kKernels) {
    if (strcmp(kernel.name, name)) continue;
    const cudaError_t status = cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (status) return status;
    void* arguments[] = {const_cast<void*>(params)};
    return cudaLaunchKernel(kernel.entry, dim3(x, y), dim3(zipccl::kThreads), arguments, shared, static_cast<cudaStream_t>(stream));
  }
  return cudaErrorInvalidDeviceFunction;
}
extern "C" const char* zipccl_cuda_error(int32_t status) { return cudaGetErrorString(cudaError_t(status)); }
