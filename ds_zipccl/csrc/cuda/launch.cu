// The kernels behind the C interface of cuda/interface.h.
//
// The build compiles this file once for each part of the kernels; the one with part 1 has the interface.
#include <string.h>

#include "cuda/interface.h"
#include "cuda/kernels.cuh"

namespace zipccl_launch {

struct Kernel {
  const char* name;
  const void* entry;
};
struct Part {
  const Kernel *begin, *end;
  const Part* next;
};
inline const Part* parts = nullptr;  // of all translation units

}  // namespace zipccl_launch

namespace {

using namespace zipccl_launch;

#define ZIPCCL_ENTRY(blocks, kernel, ...) {#kernel, reinterpret_cast<const void*>(kernel)},
const Kernel kKernels[] = {ZIPCCL_EACH_KERNEL(ZIPCCL_ENTRY)};
const struct Listed : Part {
  Listed() : Part{kKernels, kKernels + sizeof kKernels / sizeof *kKernels, parts} { parts = this; }
} kListed;

}  // namespace

#if ZIPCCL_PARTS & 1
const void* zipccl_cuda_kernel(const char* name) {
  for (const Part* part = parts; part; part = part->next)
    for (const Kernel* kernel = part->begin; kernel < part->end; ++kernel)
      if (!strcmp(kernel->name, name)) return kernel->entry;
  return nullptr;
}

int32_t zipccl_cuda_device(int32_t* device) { return cudaGetDevice(device); }

int32_t zipccl_cuda_load(const void* kernel, uint32_t shared) {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (!status) status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  // Four blocks of a kernel on a multiprocessor need nearly all of its memory as shared memory, and not as cache.
  if (!status && shared > 32 << 10)
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  return status;
}

int32_t zipccl_cuda_start(const void* kernel, uint32_t x, uint32_t y, uint32_t threads, uint32_t shared, const void* params, void* stream) {
  void* arguments[] = {const_cast<void*>(params)};
  return cudaLaunchKernel(kernel, dim3(x, y), dim3(threads), arguments, shared, static_cast<cudaStream_t>(stream));
}

const char* zipccl_cuda_error(int32_t status) { return cudaGetErrorString(cudaError_t(status)); }
#endif
