// The device of the driver: all that differs between a GPU and the CPU, and memory with guards.
#pragma once
#ifndef __CUDACC__
#include "emulation.h"  // first: it defines the words that the kernels are written in
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#include "cuda/kernels.cuh"
#else
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/hash.cuh"
#include "cuda/sum.cuh"
#endif

namespace {

using Bytes = std::vector<uint8_t>;

[[noreturn]] void stop(const std::string& why) {
  fprintf(stderr, "driver: %s\n", why.c_str());
  exit(2);
}

// ------------------------------------------------------------------------------ the device: all that differs between a GPU and the CPU

#ifdef __CUDACC__
using Stream = cudaStream_t;
void must(cudaError_t status, const char* call) {
  if (status) stop(std::string(call) + ": " + cudaGetErrorString(status));
}
#define MUST(call) must(call, #call)
void* device_memory(size_t bytes) {
  void* at = nullptr;
  MUST(cudaMalloc(&at, bytes ? bytes : 1));
  return at;
}
void device_free(void* at) { MUST(cudaFree(at)); }
void upload(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes) MUST(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
}
void download(void* to, const void* from, size_t bytes) {
  if (bytes) MUST(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}
void set_bytes(void* at, int value, size_t bytes, Stream stream) {
  if (bytes) MUST(cudaMemsetAsync(at, value, bytes, stream));
}
Stream new_stream() {
  Stream stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
void finish() { MUST(cudaDeviceSynchronize()); }
void open_device(const char*) { MUST(cudaFree(nullptr)); }
int32_t run_kernel(const char* name, uint32_t x, uint32_t y, uint32_t shared, const void* params, Stream stream) {
#define ZIPCCL_ENTRY(blocks, kernel, ...) {#kernel, reinterpret_cast<const void*>(kernel)},
  static const std::map<std::string, const void*> kernels = {ZIPCCL_EACH_KERNEL(ZIPCCL_ENTRY)};
  const auto found = kernels.find(name);
  if (found == kernels.end()) stop(std::string("no kernel ") + name);
  MUST(cudaFuncSetAttribute(found->second, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  void* arguments[] = {const_cast<void*>(params)};
  return cudaLaunchKernel(found->second, dim3(x, y), dim3(zipccl::kThreads), arguments, shared, stream);
}
void next_order() {}
#else
}  // namespace
#include <dlfcn.h>
namespace {
using Stream = void*;
void* device_memory(size_t bytes) { return aligned_alloc(256, (bytes + 256) / 256 * 256); }
void device_free(void* at) { free(at); }
void upload(void* to, const void* from, size_t bytes, Stream) { memcpy(to, from, bytes); }
void download(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
void set_bytes(void* at, int value, size_t bytes, Stream) { memset(at, value, bytes); }
Stream new_stream() { return nullptr; }
void finish() {}
int32_t (*run_kernel)(const char* name, uint32_t x, uint32_t y, uint32_t shared, const void* params, void* stream);
void (*seed_order)(uint64_t);
void open_device(const char* library) {
  void* const handle = library ? dlopen(library, RTLD_NOW) : nullptr;
  if (!handle) stop(library ? dlerror() : "the emulation is a library: name it with --library");
  run_kernel = reinterpret_cast<decltype(run_kernel)>(dlsym(handle, "zipccl_cuda_launch"));
  seed_order = reinterpret_cast<decltype(seed_order)>(dlsym(handle, "zipccl_emulation_seed"));
  if (!run_kernel || !seed_order) stop(std::string(library) + " is not the emulation");
}
// Lets the threads of the next kernel run in another order.
void next_order() {
  static uint64_t seed = 0;
  seed_order(seed++);
}
#endif

// The only place that knows how the launchers call a kernel.
void start(const std::string& kernel, uint64_t items, uint32_t rows, size_t shared, const void* params, Stream stream) {
  next_order();
  const int32_t status = run_kernel(kernel.c_str(), uint32_t(items), rows, uint32_t(shared), params, stream);
  if (status) stop(kernel + " was not started: status " + std::to_string(status));
}

// ------------------------------------------------------------------------------------------------------------------------------ memory

constexpr uint8_t kGuard = 0x5c;
constexpr size_t kGuardBytes = 256;
bool bare = false;

// Memory of buffers with guards. cudaMalloc and cudaFree wait for the device, and a sanitizer follows each call: thousands of trials with
// some buffers each spend their time there. The arena is empty again when no buffer lives.
class Arena {
 public:
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (!begin_) begin_ = static_cast<uint8_t*>(device_memory(kBytes));
    if (bytes > kBytes - used_) return static_cast<uint8_t*>(device_memory(bytes));
    ++living_, used_ += bytes;
    return begin_ + used_ - bytes;
  }
  void give(uint8_t* at) {
    if (!begin_ || at < begin_ || at >= begin_ + kBytes) return device_free(at);
    if (--living_) return;
    finish();  // no stream writes any more where another stream's buffer comes next
    used_ = 0;
  }

 private:
  static constexpr size_t kBytes = size_t(256) << 20;
  uint8_t* begin_ = nullptr;
  size_t used_ = 0, living_ = 0;
};
Arena arena;

// Memory of the device: `bytes` bytes that start `shift` bytes after a multiple of 256.
class Buffer {
 public:
  Buffer(size_t bytes, size_t shift, Stream stream) : bytes_(bytes), lead_(bare ? shift : kGuardBytes + shift), stream_(stream) {
    whole_ = lead_ + bytes + (bare ? 0 : kGuardBytes);
    memory_ = bare ? static_cast<uint8_t*>(device_memory(whole_)) : arena.take(whole_);
    if (!bare) set_bytes(memory_, kGuard, whole_, stream);
  }
  Buffer(const Bytes& content, size_t shift, Stream stream) : Buffer(content.size(), shift, stream) {
    upload(at(), content.data(), content.size(), stream);
  }
  ~Buffer() { bare ? device_free(memory_) : arena.give(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* at() const { return memory_ + lead_; }
  size_t bytes() const { return bytes_; }
  void fill(int value) { set_bytes(at(), value, bytes_, stream_); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(at());
  }
  template <typename T>
  T value() const {
    T found;
    download(&found, at(), sizeof found);
    return found;
  }

  // Why the first bytes are not `wanted`, or a guard was overwritten; "" if all is well.
  std::string differs(const Bytes& wanted) const {
    Bytes found(wanted.size());
    download(found.data(), at(), found.size());
    if (found == wanted) return overwritten(bytes_);
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == wanted[i]) continue;
      char text[96];
      snprintf(text, sizeof text, "byte %zu of %zu is %02x, wanted is %02x", i, found.size(), found[i], wanted[i]);
      return text;
    }
    return "";
  }
  // Why a guard was overwritten, or a byte from `used` on.
  std::string overwritten(size_t used) const {
    if (bare) return "";
    const size_t end = lead_ + used;
    for (const auto& range : {std::make_pair(size_t(0), lead_), std::make_pair(end, whole_)}) {
      Bytes found(range.second - range.first);
      download(found.data(), memory_ + range.first, found.size());
      for (size_t i = 0; i < found.size(); ++i)
        if (found[i] != kGuard)
          return "byte " + std::to_string(ptrdiff_t(range.first + i) - ptrdiff_t(lead_)) + " of a buffer of " + std::to_string(used) +
                 " bytes was written";
    }
    return "";
  }

 private:
  size_t bytes_, lead_, whole_ = 0;
  Stream stream_;
  uint8_t* memory_ = nullptr;
};
using Held = std::shared_ptr<Buffer>;

Held buffer(size_t bytes, size_t shift, Stream stream) { return std::make_shared<Buffer>(bytes, shift, stream); }
Held buffer(const Bytes& content, size_t shift, Stream stream) { return std::make_shared<Buffer>(content, shift, stream); }
Held filled(size_t bytes, int value, Stream stream) {
  Held made = buffer(bytes, 0, stream);
  made->fill(value);
  return made;
}

}  // namespace
