// 64 words as planes of 64 bytes, lowest first: a shift or mask by a constant costs a few byte operations. For levels with vectors.
#pragma once
#include <stdint.h>

namespace zipccl {
namespace {

// `Bytes` has << >> & | on each byte; shifts are by less than 8.
template <typename W, typename Bytes>
struct BytePlanes {
  static constexpr uint32_t kPlanes = sizeof(W);
  Bytes plane[kPlanes];

  // Byte i of each word shifted; counts are constants after inlining, except for multiples of eight plus `count % 8`.
  BytePlanes operator>>(uint32_t count) const {
    const uint32_t whole = count / 8, part = count % 8;
    BytePlanes out;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kPlanes; ++i) {
      out.plane[i] = Bytes::zero();
      if (i + whole < kPlanes) out.plane[i] = part ? plane[i + whole] >> part : plane[i + whole];
      if (part && i + whole + 1 < kPlanes) out.plane[i] = out.plane[i] | plane[i + whole + 1] << (8 - part);
    }
    return out;
  }
  BytePlanes operator<<(uint32_t count) const {
    const uint32_t whole = count / 8, part = count % 8;
    BytePlanes out;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kPlanes; ++i) {
      out.plane[i] = Bytes::zero();
      if (i >= whole) out.plane[i] = part ? plane[i - whole] << part : plane[i - whole];
      if (part && i >= whole + 1) out.plane[i] = out.plane[i] | plane[i - whole - 1] >> (8 - part);
    }
    return out;
  }
  BytePlanes operator&(W mask) const {
    BytePlanes out;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kPlanes; ++i) out.plane[i] = plane[i] & uint8_t(mask >> 8 * i);
    return out;
  }
  BytePlanes operator|(const BytePlanes& other) const {
    BytePlanes out;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kPlanes; ++i) out.plane[i] = plane[i] | other.plane[i];
    return out;
  }
};

}  // namespace
}  // namespace zipccl
