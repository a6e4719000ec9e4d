// Random numbers of the fuzzers, and memory of exact size, so that AddressSanitizer sees a byte read or written outside.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef ZIPCCL_PAGES
#include <sys/mman.h>
#endif

namespace {

uint64_t state;
inline uint64_t draw() {  // splitmix64
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}
inline uint64_t below(uint64_t limit) { return draw() % limit; }

[[noreturn]] inline void fail(const char* what) {
  printf("FAILED: %s\n", what);
  exit(1);
}

// Memory of exactly `size` bytes, `shift` bytes from an aligned address; a null pointer where size is 0, as an empty tensor has. With
// ZIPCCL_PAGES, for programs without AddressSanitizer, it ends where a page begins that no access survives.
class Exact {
 public:
#ifdef ZIPCCL_PAGES
  explicit Exact(uint64_t size, uint64_t = below(16)) : size_(size) {
    if (!size) return;
    memory_ = static_cast<uint8_t*>(mmap(nullptr, pages() + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED || mprotect(memory_, pages(), PROT_READ | PROT_WRITE)) abort();
    data = memory_ + pages() - size;
  }
  ~Exact() {
    if (size_) munmap(memory_, pages() + kPage);
  }
#else
  explicit Exact(uint64_t size, uint64_t shift = below(16))
      : size_(size), memory_(size ? static_cast<uint8_t*>(malloc(size + shift)) : nullptr) {
    data = size ? memory_ + shift : nullptr;
  }
  ~Exact() { free(memory_); }
#endif
  Exact(const Exact&) = delete;
  uint64_t size() const { return size_; }
  uint8_t* data = nullptr;

 private:
#ifdef ZIPCCL_PAGES
  static constexpr uint64_t kPage = 1 << 16;  // the largest of any Arm kernel
  uint64_t pages() const { return (size_ + kPage - 1) / kPage * kPage; }
#endif
  uint64_t size_;
  uint8_t* memory_ = nullptr;
};

}  // namespace
