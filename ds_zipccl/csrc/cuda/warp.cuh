// Warp primitives of the CUDA kernels: a warp works on a block (FORMAT.md section 2), its lanes on octets of eight elements.
#pragma once
#include "common/exponent_block.cuh"
#ifndef ZIPCCL_EMULATION  // the tests run this source on the CPU, with their own definitions
#define ZIPCCL_DEVICE __device__ __forceinline__
#define ZIPCCL_KERNEL(min_blocks) extern "C" __global__ void __launch_bounds__(256, min_blocks)
// Shared memory is declared by the kernel's launch; `Type` says how it is laid out.
#define ZIPCCL_SHARED(Type, name)                     \
  extern __shared__ __align__(16) uint8_t zipccl_shared[]; \
  Type& name = *reinterpret_cast<Type*>(zipccl_shared)

// Bit 4 a + 2 b + c of a table of eight bits, for each bit a, b and c of three words: one instruction.
template <uint32_t kTable>
ZIPCCL_DEVICE uint32_t look_up3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(found) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return found;
}

// The zeros above the highest one of x, which is not zero. __clz needs another instruction, for zero.
ZIPCCL_DEVICE uint32_t zeros_above(uint32_t x) {
  uint32_t count;
  asm("bfind.shiftamt.u32 %0, %1;" : "=r"(count) : "r"(x));
  return count;
}

// x, and that of the lane `distance` below added where there is one. The shuffle says whether there is one; __shfl_up_sync does not.
ZIPCCL_DEVICE uint32_t add_from_below(uint32_t x, uint32_t distance) {
  uint32_t sum;
  asm volatile(
      "{ .reg .pred there; .reg .b32 other; shfl.sync.up.b32 other|there, %1, %2, 0, 0xffffffff;"
      " @there add.u32 other, other, %1; mov.b32 %0, other; }"
      : "=r"(sum)
      : "r"(x), "r"(distance));
  return sum;
}
#endif

namespace zipccl {
namespace {

constexpr uint32_t kLanes = 32, kWarps = 8, kThreads = kWarps * kLanes;
constexpr uint32_t kRow = 8 * kLanes;            // elements of a row: an octet for every lane
constexpr uint32_t kRows = kMaxBlock / kRow;     // lane l has elements 256 r + 8 l and on of row r
constexpr uint32_t kEveryLane = 0xffffffffu;
constexpr uint32_t kEachByte = 0x01010101u;      // times a byte: that byte four times

ZIPCCL_DEVICE uint32_t lane_id() { return threadIdx.x % kLanes; }
ZIPCCL_DEVICE uint32_t warp_id() { return threadIdx.x / kLanes; }
ZIPCCL_DEVICE uint32_t low_ones(uint32_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }
ZIPCCL_DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The bits of a where the mask has ones, and those of b elsewhere.
ZIPCCL_DEVICE uint32_t blend(uint32_t mask, uint32_t a, uint32_t b) { return look_up3<0xca>(mask, a, b); }

ZIPCCL_DEVICE uint32_t log2_of(uint32_t power) { return uint32_t(__ffs(int(power))) - 1; }

// Number of chunks, or blocks, of a power of two of words.
ZIPCCL_DEVICE uint32_t pieces(uint64_t numel, uint32_t power) { return uint32_t((numel + power - 1) >> log2_of(power)); }

// Sum of x over the lanes below this one. x may be several numbers in one word, as long as none of these sums overflows its part.
ZIPCCL_DEVICE uint32_t sum_below(uint32_t x) {
  uint32_t sum = x;
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) sum = add_from_below(sum, distance);
  return sum - x;
}

// Eight bytes, one for each element of an octet.
struct Bytes8 {
  uint32_t half[2];
  ZIPCCL_DEVICE uint32_t byte(uint32_t i) const { return half[i / 4] >> 8 * (i % 4) & 255; }
};

// Bit `bit` of each byte as a byte of a bit plane.
ZIPCCL_DEVICE uint32_t plane_of(const Bytes8& x, uint32_t bit) {
  const uint32_t low = x.half[0] << (7 - bit) & 0x80808080u, high = x.half[1] << (7 - bit) & 0x80808080u;
  return __dp4a(high, 0x80402010u, __dp4a(low, 0x08040201u, 0u)) >> 7;
}

// The inverse: each bit of a byte as a byte of 0 or 1.
ZIPCCL_DEVICE Bytes8 spread(uint32_t plane) {
  return {{(plane & 15) * 0x00204081u & kEachByte, (plane >> 4) * 0x00204081u & kEachByte}};
}

// Four words' low bytes as one.
ZIPCCL_DEVICE uint32_t pack4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The number of elements in a block and, of these, in a lane of a row: eight in a whole block, fewer in a partial one. Nearly all blocks
// are whole.
struct Whole {
  static constexpr uint32_t n = kMaxBlock, unroll = kRows;
  static constexpr bool whole = true;
  ZIPCCL_DEVICE uint32_t length(uint32_t) const { return 8; }
  ZIPCCL_DEVICE uint32_t marks() const { return ~0u; }
};
struct Part {
  static constexpr uint32_t unroll = 1;  // a row at a time: fewer registers
  static constexpr bool whole = false;
  uint32_t n;
  ZIPCCL_DEVICE uint32_t length(uint32_t row) const {
    const uint32_t at = row * kRow + 8 * lane_id();
    return at >= n ? 0 : least(n - at, 8);
  }
  // The bits of a lane's word of a plane that stand for elements.
  ZIPCCL_DEVICE uint32_t marks() const { return 32 * lane_id() >= n ? 0 : low_ones(n - 32 * lane_id()); }
};

// Where the elements of a warp's rows that are marked in `masks` go when they are put close together, in order: row r's masks are
// byte r.
struct Places {
  uint32_t early, late, count;  // two rows' places each

  ZIPCCL_DEVICE explicit Places(uint32_t masks) {
    static_assert(kRows == 4, "a byte of the sums for each row");
    const uint32_t counts = uint32_t(__popc(masks & 255)) | uint32_t(__popc(masks >> 8 & 255)) << 8 |
                            uint32_t(__popc(masks >> 16 & 255)) << 16 | uint32_t(__popc(masks >> 24)) << 24;
    const uint32_t below = sum_below(counts);  // at most 31 * 8
    const uint32_t last_below = __shfl_sync(kEveryLane, below, kLanes - 1), last = __shfl_sync(kEveryLane, counts, kLanes - 1);
    uint32_t at[kRows];
    count = 0;
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      at[row] = count + (below >> 8 * row & 255);
      count += (last_below >> 8 * row & 255) + (last >> 8 * row & 255);
    }
    early = at[0] | at[1] << 16, late = at[2] | at[3] << 16;
  }
  // Of this lane's first one in a row.
  ZIPCCL_DEVICE uint32_t of(uint32_t row) const { return (row < 2 ? early : late) >> 16 * (row % 2) & 0xffff; }
};

// A string of bits that starts at any byte.
struct BitString {
  const uint32_t* words;  // of which the first byte is one
  uint32_t phase;         // its bits before that byte

  ZIPCCL_DEVICE explicit BitString(const uint8_t* bytes)
      : words(reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(bytes) & ~uintptr_t(3))),
        phase(8 * uint32_t(reinterpret_cast<uintptr_t>(bytes) & 3)) {}
  // The 32 bits from bit `at` on; those from bit `end` on are zero. Reads only words that hold asked bits.
  ZIPCCL_DEVICE uint32_t read(uint32_t at, uint32_t end) const {
    const uint32_t count = at < end ? end - at : 0, first = phase + at;
    const uint32_t low = count ? words[first / 32] : 0, high = first % 32 + least(count, 32) > 32 ? words[first / 32 + 1] : 0;
    return __funnelshift_r(low, high, first) & low_ones(count);
  }
  // `count` bits, at most 32, from bit `at` on, and any bits past them. Reads only words that hold asked bits.
  ZIPCCL_DEVICE uint32_t peek(uint32_t at, uint32_t count) const {
    if (count == 0) return 0;
    const uint32_t first = phase + at;
    return __funnelshift_r(words[first / 32], words[(first + count - 1) / 32], first);
  }
};

// Sets bits of a zeroed string of words in shared memory, from bit `at` on; other lanes may set others at the same time.
ZIPCCL_DEVICE void put_bits(uint8_t* string, uint32_t at, uint32_t bits) {
  uint32_t* word = reinterpret_cast<uint32_t*>(string) + at / 32;
  const uint32_t low = bits << at % 32, high = __funnelshift_l(bits, 0, at);
  if (low) atomicOr(word, low);
  if (high) atomicOr(word + 1, high);
}

// The same for `count` bits, more than none, of each of two strings, with `distance` bits between their places.
ZIPCCL_DEVICE void put_both(uint8_t* string, uint32_t at, uint32_t distance, uint32_t first, uint32_t second) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(string);
  const uint32_t other = at + distance, first_over = __funnelshift_l(first, 0, at), second_over = __funnelshift_l(second, 0, other);
  atomicOr(words + at / 32, first << at % 32);
  atomicOr(words + other / 32, second << other % 32);
  if (first_over) atomicOr(words + at / 32 + 1, first_over);
  if (second_over) atomicOr(words + other / 32 + 1, second_over);
}

// The warp copies bytes from shared memory (a multiple of 4) to any address. `kUnroll`: words of a lane at a time.
template <uint32_t kUnroll = 1>
ZIPCCL_DEVICE void copy_bytes(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  const uint32_t head = least(uint32_t(-reinterpret_cast<uintptr_t>(to)) & 3, bytes), words = (bytes - head) / 4;
  const uint32_t* const source = reinterpret_cast<const uint32_t*>(from);
  uint32_t* const target = reinterpret_cast<uint32_t*>(to + head);
#pragma unroll kUnroll
  for (uint32_t i = lane_id(); i < words; i += kLanes) target[i] = __funnelshift_r(source[i], source[i + (head > 0)], 8 * head);
  // At most three bytes before the words and three after them.
  const uint32_t at = lane_id() < head ? lane_id() : lane_id() + 4 * words;
  if (at < bytes && lane_id() < 6) to[at] = from[at];
}

}  // namespace
}  // namespace zipccl
