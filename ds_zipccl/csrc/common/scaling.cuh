// Scales of groups (FORMAT.md 2.10 and section 3), on host and device.
#pragma once
#include "common/float_values.cuh"

// How values become codes (FORMAT.md 2.10): `bits` is 8 unless `integers`, groups have 2^log2 elements.
struct ZipcclScaling {
  uint32_t integers, bits, log2, hadamard;
};

namespace zipccl {
namespace {

constexpr uint32_t kMaxGroup = 512;
constexpr uint32_t kStays = 1u << 31;  // in the place of a scale: the group stays as it is
constexpr uint32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;

// The scale of a group with this largest magnitude, as the bits of a float; kStays where it has none.
ZIPCCL_FN uint32_t scale_of(uint32_t largest, const ZipcclScaling& s) {
  if (largest >= kInfinite) return kStays;
  const uint32_t reach = s.hadamard ? s.log2 : 0;
  if (!s.integers) {
    const int32_t scale = int32_t(largest >> 23) - 8 + ((largest & 0x7fffff) > 0x600000);
    return scale < 1 ? 0 : uint32_t(scale) <= 246 - reach ? uint32_t(scale) : kStays;
  }
  const float m = float((1u << (s.bits - 1)) - 1);
  const uint32_t scale = (as_bits(as_float(largest) / m) + 0xffff) >> 16;
  return scale >> 7 <= 255 - s.bits - reach ? scale : kStays;
}

}  // namespace
}  // namespace zipccl
