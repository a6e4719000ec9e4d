// Runs CUDA kernel source on the CPU, for tests on machines without a GPU. Every thread of a block is a fiber of its own; fibers run one at
// a time until they wait for one another, and a seed decides which fiber goes on. So code that works only while the lanes of a warp
// happen to move together, or the warps of a block, or only with its blocks started in order, fails here with some seed.
#pragma once
#include <stdint.h>
#include <string.h>

#define ZIPCCL_EMULATION
#define ZIPCCL_DEVICE inline

#define ZIPCCL_KERNEL(min_blocks) extern "C" void
#define ZIPCCL_SHARED(Type, name) Type& name = *static_cast<Type*>(emulation::shared_memory(sizeof(Type)))

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

constexpr uint32_t kLanes = 32;

struct Index {
  uint32_t x, y;
};
Index thread_index();
Index block_index();
Index grid_size();
void* shared_memory(uint64_t bytes);

// Waits until every lane of the warp has come to the same operation, and returns the value of each. The lanes must all take part.
const uint32_t* exchange(uint32_t value, const char* operation);
void wait_for_block();
void give_way();  // other fibers may run

template <typename Fold>
uint32_t fold(uint32_t value, const char* operation, Fold next) {
  const uint32_t* const all = exchange(value, operation);
  uint32_t result = all[0];
  for (uint32_t lane = 1; lane < kLanes; ++lane) result = next(result, all[lane]);
  return result;
}

// Memory operations of a lane on its own: others may come before and after.
template <typename T, typename Next>
T atomic(T* at, Next next) {
  give_way();
  const T before = *at;
  *at = next(before);
  return before;
}

template <typename Each>
uint32_t by_parts(uint32_t a, uint32_t b, uint32_t bits, Each each) {
  uint32_t result = 0;
  const uint32_t mask = (1u << bits) - 1;
  for (uint32_t at = 0; at < 32; at += bits) result |= (each(a >> at & mask, b >> at & mask) & mask) << at;
  return result;
}

}  // namespace emulation

#define threadIdx (emulation::thread_index())
#define blockIdx (emulation::block_index())
#define gridDim (emulation::grid_size())

inline void __syncthreads() { emulation::wait_for_block(); }
inline void __syncwarp() { emulation::exchange(0, "syncwarp"); }
inline void __nanosleep(uint32_t) { emulation::give_way(); }

inline uint32_t __shfl_sync(uint32_t, uint32_t value, uint32_t lane) { return emulation::exchange(value, "shfl")[lane % 32]; }
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, uint32_t distance) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t* const all = emulation::exchange(value, "shfl_up");
  return lane < distance ? value : all[lane - distance];
}
inline uint32_t __ballot_sync(uint32_t, uint32_t predicate) {
  const uint32_t* const all = emulation::exchange(predicate, "ballot");
  uint32_t mask = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) mask |= uint32_t(all[lane] != 0) << lane;
  return mask;
}
inline int __any_sync(uint32_t, int predicate) {
  return int(emulation::fold(predicate != 0, "any", [](uint32_t a, uint32_t b) { return a | b; }));
}
inline int __all_sync(uint32_t, int predicate) {
  return int(emulation::fold(predicate != 0, "all", [](uint32_t a, uint32_t b) { return a & b; }));
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  return emulation::fold(value, "reduce_add", [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  return emulation::fold(value, "reduce_or", [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  return emulation::fold(value, "reduce_min", [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return emulation::fold(value, "reduce_max", [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) {
  return emulation::atomic(at, [=](uint32_t before) { return before + value; });
}
inline uint32_t atomicAdd_system(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t value) {
  return emulation::atomic(at, [=](uint32_t before) { return before == expected ? value : before; });
}
inline uint32_t atomicMin(uint32_t* at, uint32_t value) {
  return emulation::atomic(at, [=](uint32_t before) { return value < before ? value : before; });
}
inline uint32_t atomicOr(uint32_t* at, uint32_t value) {
  return emulation::atomic(at, [=](uint32_t before) { return before | value; });
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  return emulation::atomic(at, [=](unsigned long long before) { return before + value; });
}
inline void __threadfence() {}
inline unsigned long long atomicMin_system(unsigned long long* at, unsigned long long value) {
  return emulation::atomic(at, [=](unsigned long long before) { return value < before ? value : before; });
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __clzll(int64_t x) { return x ? __builtin_clzll(uint64_t(x)) : 64; }
inline int __clz(int x) { return x ? __builtin_clz(uint32_t(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t shift) {
  return uint32_t((uint64_t(high) << 32 | low) << (shift < 32 ? shift : 32) >> 32);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
  for (uint32_t i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
  return sum;
}
inline uint32_t __vsub4(uint32_t a, uint32_t b) {
  return emulation::by_parts(a, b, 8, [](uint32_t x, uint32_t y) { return x - y; });
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return emulation::by_parts(a, b, 16, [](uint32_t x, uint32_t y) { return x < y ? x : y; });
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return emulation::by_parts(a, b, 16, [](uint32_t x, uint32_t y) { return x > y ? x : y; });
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline long long __double_as_longlong(double x) {
  long long bits;
  memcpy(&bits, &x, 8);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// The functions of warp.cuh that are single instructions of PTX.
template <uint32_t kTable>
uint32_t look_up3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t found = 0;
  for (uint32_t at = 0; at < 8; ++at) found |= kTable >> at & 1 ? (at & 4 ? a : ~a) & (at & 2 ? b : ~b) & (at & 1 ? c : ~c) : 0;
  return found;
}
inline uint32_t zeros_above(uint32_t x) { return x ? uint32_t(__builtin_clz(x)) : ~0u; }
inline uint32_t add_from_below(uint32_t x, uint32_t distance) {
  const uint32_t below = __shfl_up_sync(~0u, x, distance);
  return threadIdx.x % 32 < distance ? x : x + below;
}
