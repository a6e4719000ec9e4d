// ZFP for CUDA (FORMAT.md 2.11): a lane takes a block of four values, a warp 32 blocks, whose codes are whole words of 32 bits.
#pragma once
#include "common/zfp_block.cuh"
#include "cuda/frame.cuh"

namespace zipccl {
namespace {

struct ZfpJob {
  const void* words;  // of an encoder and a projection, at any address of a word
  void* out;          // of a decoder and a projection, at any address of a word; may be `words`
  uint32_t* codes;    // whole words of 64 bits
  uint64_t* status;   // of an encoder: 1 if a word is not finite
  uint64_t numel;
  uint32_t rate;
};

constexpr uint32_t kZfpUnit = kZfpValues * kLanes;  // values of a warp
constexpr uint32_t kZfpMostRate = 32;

// Planes by their tables, which the threads of a block make together.
struct ZfpTables {
  uint16_t codes[kZfpValues + 1][1 << kZfpValues];
  uint16_t planes[kZfpValues + 1][1 << kZfpPlaneBits];

  static ZIPCCL_DEVICE uint16_t packed(const ZfpPlane& plane) { return uint16_t(plane.bits | plane.length << 8 | plane.next << 11); }
  static ZIPCCL_DEVICE ZfpPlane unpacked(uint32_t x) { return {uint8_t(x & 255), uint8_t(x >> 8 & 7), uint8_t(x >> 11)}; }
  ZIPCCL_DEVICE void fill() {
    for (uint32_t i = threadIdx.x; i < (kZfpValues + 1) << kZfpValues; i += kThreads)
      codes[i >> kZfpValues][i % (1 << kZfpValues)] = packed(zfp_code_plane(i >> kZfpValues, i % (1 << kZfpValues)));
    for (uint32_t i = threadIdx.x; i < (kZfpValues + 1) << kZfpPlaneBits; i += kThreads) {
      const uint32_t n = i >> kZfpPlaneBits, bits = i % (1 << kZfpPlaneBits);
      planes[n][bits] = packed(zfp_plane_of(n, bits, kZfpPlaneBits));
    }
    __syncthreads();
  }
  ZIPCCL_DEVICE ZfpPlane code(uint32_t n, uint32_t plane) const { return unpacked(codes[n][plane]); }
  ZIPCCL_DEVICE ZfpPlane plane(uint32_t n, uint32_t bits) const { return unpacked(planes[n][bits]); }
};

struct ZfpShared {
  ZfpTables tables;
  uint32_t words[kWarps][kZfpUnit * kZfpMostRate / 32];  // the codes of a warp's blocks
};

// The code of a block: at most 128 bits, the first of them lowest.
struct ZfpCode {
  uint64_t low = 0, high = 0;

  ZIPCCL_DEVICE void put(uint32_t at, uint32_t bits) {  // at most 8 of them, from bit `at` on; they may pass the end
    if (at >= 64) {
      high |= uint64_t(bits) << (at - 64);
    } else {
      low |= uint64_t(bits) << at;
      if (at > 56) high |= uint64_t(bits) >> (64 - at);
    }
  }
  ZIPCCL_DEVICE bool some() const { return low & 1; }
  ZIPCCL_DEVICE uint32_t from(uint32_t at) const {  // the low bits of the code from bit `at` on, which is not 0
    return uint32_t(at >= 64 ? high >> (at - 64) : low >> at | high << (64 - at));
  }
  ZIPCCL_DEVICE void keep(uint32_t bits) {  // and clear those behind them
    if (bits < 64) low &= (uint64_t(1) << bits) - 1;
    if (bits < 128) high &= bits > 64 ? (uint64_t(1) << (bits - 64)) - 1 : 0;
  }
  ZIPCCL_DEVICE uint32_t word(uint32_t i) const { return uint32_t((i < 2 ? low : high) >> 32 * (i % 2)); }
  ZIPCCL_DEVICE void set_word(uint32_t i, uint32_t word) { (i < 2 ? low : high) |= uint64_t(word) << 32 * (i % 2); }
};

template <typename F>
ZIPCCL_DEVICE ZfpBlock load_block(const void* words, uint64_t at, uint64_t count) {
  const typename F::Word* const from = static_cast<const typename F::Word*>(words) + at;
  ZfpBlock block;
#pragma unroll
  for (uint32_t i = 0; i < kZfpValues; ++i) block.word[i] = as_bits(Values<F>::from(from[zfp_source(i, count)]));
  return block;
}

template <typename F>
ZIPCCL_DEVICE void store_block(const ZfpBlock& block, void* out, uint64_t at, uint64_t count) {
  typename F::Word* const to = static_cast<typename F::Word*>(out) + at;
#pragma unroll
  for (uint32_t i = 0; i < kZfpValues; ++i)
    if (i < count) to[i] = finite_word<F>(block.word[i]);
}

// Calls each(number of the unit, first value of this lane, values from there to the end) for the units of this warp.
template <typename Each>
ZIPCCL_DEVICE void each_unit(const ZfpJob& job, Each each) {
  const uint64_t units = (job.numel + kZfpUnit - 1) / kZfpUnit;
  for (uint64_t unit = uint64_t(blockIdx.x) * kWarps + warp_id(); unit < units; unit += uint64_t(gridDim.x) * kWarps) {
    const uint64_t at = unit * kZfpUnit + lane_id() * kZfpValues;
    each(unit, at, at < job.numel ? job.numel - at : 0);
  }
}

// 32-bit words of a unit's codes; the last unit has those that pad a word of 64 bits.
ZIPCCL_DEVICE uint32_t words_of_unit(const ZfpJob& job, uint64_t unit) {
  const uint64_t blocks = (job.numel + kZfpValues - 1) / kZfpValues, words = (blocks * kZfpValues * job.rate + 63) / 64 * 2;
  const uint64_t left = words - unit * kZfpValues * job.rate;
  return uint32_t(left < kZfpValues * job.rate ? left : kZfpValues * job.rate);
}

template <typename F>
ZIPCCL_DEVICE void encode_zfp(const ZfpJob& job) {
  ZIPCCL_SHARED(ZfpShared, shared);
  shared.tables.fill();
  uint32_t* const words = shared.words[warp_id()];
  const uint32_t bits = kZfpValues * job.rate;
  bool finite = true;
  each_unit(job, [&](uint64_t unit, uint64_t at, uint64_t count) {
    for (uint32_t i = lane_id(); i < bits; i += kLanes) words[i] = 0;
    __syncwarp();
    if (count) {
      const ZfpBlock block = load_block<F>(job.words, at, count);
      finite &= block.finite();
      const ZfpCode code = zfp_encode<ZfpCode>(block, job.rate, shared.tables);
      for (uint32_t i = 0; 32 * i < bits; ++i) put_bits(reinterpret_cast<uint8_t*>(words), lane_id() * bits + 32 * i, code.word(i));
    }
    __syncwarp();
    const uint32_t length = words_of_unit(job, unit);
    for (uint32_t i = lane_id(); i < length; i += kLanes) job.codes[unit * bits + i] = words[i];
    __syncwarp();
  });
  if (!finite) atomicOr(reinterpret_cast<uint32_t*>(job.status), 1u);
}

template <typename F>
ZIPCCL_DEVICE void decode_zfp(const ZfpJob& job) {
  ZIPCCL_SHARED(ZfpShared, shared);
  shared.tables.fill();
  uint32_t* const words = shared.words[warp_id()];
  const uint32_t bits = kZfpValues * job.rate;
  each_unit(job, [&](uint64_t unit, uint64_t at, uint64_t count) {
    const uint32_t length = words_of_unit(job, unit);
    for (uint32_t i = lane_id(); i < length; i += kLanes) words[i] = job.codes[unit * bits + i];
    __syncwarp();
    if (count) {
      const BitString string(reinterpret_cast<const uint8_t*>(words));
      ZfpCode code;
      for (uint32_t i = 0; 32 * i < bits; ++i) code.set_word(i, string.peek(lane_id() * bits + 32 * i, least(bits - 32 * i, 32)));
      store_block<F>(zfp_decode(code, job.rate, shared.tables), job.out, at, count);
    }
    __syncwarp();
  });
}

// A lane reads its block before it writes it.
template <typename F>
ZIPCCL_DEVICE void project_zfp(const ZfpJob& job) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(ZfpShared, shared);
  shared.tables.fill();
  each_unit(job, [&](uint64_t, uint64_t at, uint64_t count) {
    if (!count) return;
    const ZfpBlock block = load_block<F>(job.words, at, count);
    if (block.finite()) {
      const ZfpCode code = zfp_encode<ZfpCode>(block, job.rate, shared.tables);
      return store_block<F>(zfp_decode(code, job.rate, shared.tables), job.out, at, count);
    }
    for (uint32_t i = 0; i < kZfpValues && i < count; ++i) static_cast<Word*>(job.out)[at + i] = static_cast<const Word*>(job.words)[at + i];
  });
}

}  // namespace
}  // namespace zipccl
