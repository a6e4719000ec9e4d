// Orders of eight bytes for levels that pack bytes by table.
#pragma once
#include <stdint.h>

namespace zipccl {
namespace {

// For every mask of eight: which of eight come first when those at the ones are packed, and where each came from; 0x80: none.
struct Shuffles {
  alignas(8) uint8_t pack[256][8], unpack[256][8];
  constexpr Shuffles() : pack(), unpack() {
    for (uint32_t mask = 0; mask < 256; ++mask) {
      uint32_t count = 0;
      for (uint32_t i = 0; i < 8; ++i) {
        unpack[mask][i] = mask >> i & 1 ? uint8_t(count) : 0x80;
        if (mask >> i & 1) pack[mask][count++] = uint8_t(i);
      }
      while (count < 8) pack[mask][count++] = 0x80;
    }
  }
};
constexpr Shuffles kShuffles;

}  // namespace
}  // namespace zipccl
