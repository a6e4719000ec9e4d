// Denormals on: arithmetic of lossy codecs is the same in threads that flush denormals and in others.
#pragma once
#if defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <stdint.h>
#endif

namespace zipccl {
namespace {

// Lets this thread keep denormals, and round to the nearest, until the end of a scope. What is between is called through pointers, so that
// no compiler moves arithmetic over the switch.
class Denormals {
 public:
#if defined(__SSE2__)
  Denormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0xe040u); }
  ~Denormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
#elif defined(__aarch64__)
  Denormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ & ~uint64_t(0x01c00000)));
  }
  ~Denormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  uint64_t before_;
#else
  Denormals() {}
#endif
 public:
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;
};

}  // namespace
}  // namespace zipccl
