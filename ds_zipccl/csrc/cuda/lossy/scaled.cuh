// Scaled payloads for CUDA (FORMAT.md 2.10): a warp takes a group, of which lane l has the values l, l + 32, l + 64 and so on. Values are
// multiplied and added by functions that no compiler contracts.
#pragma once
#include "common/scaling.cuh"
#include "common/zfp_block.cuh"
#include "cuda/frame.cuh"

namespace zipccl {
namespace {

struct ScaledJob {
  const void* words;       // of an encoder and a projection, at any address of a word
  void* out;               // of a decoder and a projection, at any address of a word; may be `words`
  void* scales;            // one for each group: bytes of E4M3, 16-bit words of INT
  uint8_t* codes;          // at a multiple of 4; those of an encoder are in the places of their groups
  const uint64_t* places;  // of a decoder, for each group: groups with codes up to this one, itself included. Null: all have codes
  uint64_t* status;        // of an encoder: 1 if a group stays as it is; of a decoder as in DecodeJobs
  uint64_t numel;
  ZipcclScaling scaling;
};

constexpr uint32_t kMostValues = kMaxGroup / kLanes;  // of a lane

// The numbers of a group of INT are from 0 to 2m.
ZIPCCL_DEVICE int32_t half_range(const ZipcclScaling& s) { return (1 << (s.bits - 1)) - 1; }

ZIPCCL_DEVICE uint32_t e4m3_code(float v, uint32_t scale) {
  const uint32_t bits = as_bits(__fmul_rn(v, as_float((254 - scale) << 23))), size = bits & kMagnitude;
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 960;
  const uint32_t subnormal = as_bits(__fadd_rn(as_float(size), 16384.0f)) - as_bits(16384.0f);  // whose last bit is worth 2^-9
  return (size < 121u << 23 ? subnormal : normal) | (bits >> 24 & 128);
}
ZIPCCL_DEVICE float e4m3_value(uint32_t code, uint32_t scale) {
  const uint32_t size = code & 127, least = 121u << 23;
  const uint32_t subnormal = as_bits(__fsub_rn(as_float((size << 20) + least), as_float(least)));
  const uint32_t bits = (size < 8 ? subnormal : (size << 20) + (120u << 23)) | (code & 128) << 24;
  return __fmul_rn(as_float(bits), as_float(scale << 23));
}

ZIPCCL_DEVICE uint32_t int_code(float v, uint32_t scale, const ZipcclScaling& s) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
  const int32_t m = half_range(s), q = int32_t(as_bits(__fadd_rn(__fdiv_rn(v, as_float(scale << 16)), shift))) - int32_t(as_bits(shift));
  return uint32_t((q < -m ? -m : q > m ? m : q) + m);
}
ZIPCCL_DEVICE float int_value(uint32_t code, uint32_t scale, const ZipcclScaling& s) {
  return __fmul_rn(float(int32_t(code) - half_range(s)), as_float(scale << 16));
}

// The group of a warp. Loops over the values of a lane have a fixed length, so that values stay in registers.
template <typename F>
struct Group {
  using Word = typename F::Word;
  const ZipcclScaling& s;
  const uint64_t first;   // element
  const uint32_t numel;   // elements; the values of others are zeros
  const uint32_t values;  // of a lane
  float v[kMostValues];

  ZIPCCL_DEVICE Group(const ScaledJob& job, uint64_t group)
      : s(job.scaling), first(group << s.log2), numel(uint32_t(job.numel - first < 1u << s.log2 ? job.numel - first : 1u << s.log2)),
        values((1u << s.log2) / kLanes) {}

  // Calls each(value of this lane, its number in the group).
  template <typename Each>
  ZIPCCL_DEVICE void for_each(Each each) {
#pragma unroll
    for (uint32_t j = 0; j < kMostValues; ++j)
      if (j < values) each(v[j], j * kLanes + lane_id());
  }

  ZIPCCL_DEVICE void read(const void* words) {
    const Word* const from = static_cast<const Word*>(words) + first;
    for_each([&](float& value, uint32_t i) { value = i < numel ? Values<F>::from(from[i]) : 0.0f; });
    if (s.hadamard) transform();
  }
  ZIPCCL_DEVICE void transform() {
#pragma unroll
    for (uint32_t stride = 1; stride < kLanes; stride *= 2)
      for_each([&](float& value, uint32_t i) {
        const float other = as_float(__shfl_sync(kEveryLane, as_bits(value), lane_id() ^ stride));
        value = i & stride ? __fsub_rn(other, value) : __fadd_rn(value, other);
      });
#pragma unroll
    for (uint32_t stride = 1; stride < kMostValues; stride *= 2)
      if (stride < values) {
#pragma unroll
        for (uint32_t j = 0; j < kMostValues; ++j)
          if (!(j & stride) && j < values) {
            const float a = v[j], b = v[j + stride];
            v[j] = __fadd_rn(a, b), v[j + stride] = __fsub_rn(a, b);
          }
      }
  }
  ZIPCCL_DEVICE uint32_t scale() {
    uint32_t largest = 0;
    for_each([&](float value, uint32_t) {
      const uint32_t magnitude = as_bits(value) & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    });
    return scale_of(__reduce_max_sync(kEveryLane, largest), s);
  }

  // Codes that begin at a multiple of 4; a lane writes and reads a word of each plane of INT.
  ZIPCCL_DEVICE void put(uint32_t scale, uint8_t* codes) {
    if (!s.integers) return for_each([&](float value, uint32_t i) { codes[i] = uint8_t(e4m3_code(value, scale)); });
    for_each([&](float value, uint32_t i) {
      const uint32_t code = int_code(value, scale, s);
      uint32_t plane = 0;
      for (uint32_t p = 0; p < s.bits; ++p) {
        const uint32_t bits = __ballot_sync(kEveryLane, code >> p & 1);
        if (lane_id() == p) plane = bits;
      }
      if (lane_id() < s.bits) reinterpret_cast<uint32_t*>(codes)[lane_id() * values + i / kLanes] = plane;
    });
  }
  // Returns whether all codes of this lane are numbers.
  ZIPCCL_DEVICE bool get(uint32_t scale, const uint8_t* codes) {
    bool good = true;
    if (s.integers) {
      for_each([&](float& value, uint32_t i) {
        const uint32_t plane = lane_id() < s.bits ? reinterpret_cast<const uint32_t*>(codes)[lane_id() * values + i / kLanes] : 0;
        uint32_t code = 0;
        for (uint32_t p = 0; p < s.bits; ++p) code |= (__shfl_sync(kEveryLane, plane, p) >> lane_id() & 1) << p;
        value = int_value(code, scale, s);
        good &= code <= uint32_t(2 * half_range(s));
      });
    } else {
      for_each([&](float& value, uint32_t i) {
        const uint32_t code = codes[i];
        value = e4m3_value(code, scale);
        good &= (code & 127) != 127;
      });
    }
    return good;
  }
  // The values that codes of these values have.
  ZIPCCL_DEVICE void settle(uint32_t scale) {
    for_each([&](float& value, uint32_t) {
      value = s.integers ? int_value(int_code(value, scale, s), scale, s) : e4m3_value(e4m3_code(value, scale), scale);
    });
  }
  ZIPCCL_DEVICE void write(uint32_t scale, void* out) {
    Word* const to = static_cast<Word*>(out) + first;
    if (scale && s.hadamard) transform();
    const float factor = as_float((127 - (s.hadamard ? s.log2 : 0)) << 23);
    for_each([&](float value, uint32_t i) {
      if (i < numel) to[i] = scale ? finite_word<F>(as_bits(__fmul_rn(value, factor))) : Word(0);
    });
  }
};

// Calls each(number of a group) for the groups of this warp.
template <typename Each>
ZIPCCL_DEVICE void each_group_of_warp(const ScaledJob& job, Each each) {
  const uint64_t groups = (job.numel + (1u << job.scaling.log2) - 1) >> job.scaling.log2;
  for (uint64_t group = uint64_t(blockIdx.x) * kWarps + warp_id(); group < groups; group += uint64_t(gridDim.x) * kWarps) each(group);
}
ZIPCCL_DEVICE uint32_t group_bytes(const ZipcclScaling& s) { return (s.bits << s.log2) / 8; }

template <typename F>
ZIPCCL_DEVICE void encode_scaled(const ScaledJob& job) {
  each_group_of_warp(job, [&](uint64_t number) {
    Group<F> group(job, number);
    group.read(job.words);
    const uint32_t scale = group.scale();
    if (scale == kStays) {
      if (lane_id() == 0) atomicOr(reinterpret_cast<uint32_t*>(job.status), 1u);
      return;
    }
    if (lane_id() == 0) {
      if (job.scaling.integers) {
        static_cast<uint16_t*>(job.scales)[number] = uint16_t(scale);
      } else {
        static_cast<uint8_t*>(job.scales)[number] = uint8_t(scale);
      }
    }
    if (scale) group.put(scale, job.codes + number * group_bytes(job.scaling));
  });
}

template <typename F>
ZIPCCL_DEVICE void decode_scaled(const ScaledJob& job) {
  each_group_of_warp(job, [&](uint64_t number) {
    Group<F> group(job, number);
    const uint32_t scale =
        job.scaling.integers ? static_cast<const uint16_t*>(job.scales)[number] : static_cast<const uint8_t*>(job.scales)[number];
    if (scale) {
      const uint64_t place = job.places ? job.places[number] - 1 : number;
      if (!group.get(scale, job.codes + place * group_bytes(job.scaling))) report(job.status, place_of(kNone, 0, 0), BLOCK);
    }
    group.write(scale, job.out);
  });
}

template <typename F>
ZIPCCL_DEVICE void project_scaled(const ScaledJob& job) {
  using Word = typename F::Word;
  each_group_of_warp(job, [&](uint64_t number) {
    Group<F> group(job, number);
    group.read(job.words);
    const uint32_t scale = group.scale();
    if (scale == kStays) {
      for (uint32_t i = lane_id(); i < group.numel; i += kLanes)
        static_cast<Word*>(job.out)[group.first + i] = static_cast<const Word*>(job.words)[group.first + i];
      return;
    }
    if (scale) group.settle(scale);
    group.write(scale, job.out);
  });
}

}  // namespace
}  // namespace zipccl
