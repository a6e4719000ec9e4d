// A kernel that holds multiprocessors until the host lets go, as a collective of NCCL does while it waits for another rank.
#include <stdint.h>

namespace {

// Words of pinned memory, for the host and the device.
struct Words {
  uint32_t release;       // by the host: end
  uint32_t expired;       // by the device: a block ended because its time was over
  uint32_t arrived[1022];  // by the device: block i runs
};

__global__ void hold(volatile Words* words, uint64_t nanoseconds) {
  if (threadIdx.x) return;
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  words->arrived[blockIdx.x] = 1;
  __threadfence_system();
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start > nanoseconds) {  // nothing here waits for ever
      words->expired = 1;
      return;
    }
  } while (!words->release);
}

}  // namespace

extern "C" const char* spin_error(int32_t status) { return cudaGetErrorString(cudaError_t(status)); }
extern "C" int32_t spin_words(void** words) { return cudaHostAlloc(words, sizeof(Words), cudaHostAllocPortable | cudaHostAllocMapped); }
// `blocks` blocks, each of which has the shared memory of a whole multiprocessor.
extern "C" int32_t spin_start(uint32_t blocks, void* words, uint64_t nanoseconds, void* stream) {
  int device = 0, shared = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (!status) status = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (!status) status = cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (status) return status;
  hold<<<blocks, 32, shared, static_cast<cudaStream_t>(stream)>>>(static_cast<volatile Words*>(words), nanoseconds);
  return cudaGetLastError();
}
