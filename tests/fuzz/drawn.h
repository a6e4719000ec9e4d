// Random numbers of the fuzzers, and memory of exact size, so that AddressSanitizer sees a byte read or written outside.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace {

uint64_t state;
inline uint64_t draw() {  // splitmix64
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}
inline uint64_t below(uint64_t limit) { return draw() % limit; }

// Memory of exactly `size` bytes, `shift` bytes from an aligned address; a null pointer where size is 0, as an empty tensor has.
class Exact {
 public:
  explicit Exact(uint64_t size, uint64_t shift = below(16))
      : size_(size), memory_(size ? static_cast<uint8_t*>(malloc(size + shift)) : nullptr) {
    data = size ? memory_ + shift : nullptr;
  }
  Exact(const Exact&) = delete;
  ~Exact() { free(memory_); }
  uint64_t size() const { return size_; }
  uint8_t* data;

 private:
  uint64_t size_;
  uint8_t* memory_;
};

}  // namespace
