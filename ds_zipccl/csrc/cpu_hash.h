// The sums of the hash of a region (FORMAT.md section 5) as a plain loop over independent lanes, which each level compiles to its vectors.
#pragma once
#include <stdint.h>
#include <string.h>

namespace zipccl {
namespace {

constexpr uint64_t kHashKey[2] = {0x9E3779B97F4A7C15ull, 0xD1B54A32D192ED03ull};

void hash_words(const uint8_t* data, uint64_t first, uint64_t count, uint64_t* sums) {
  constexpr uint32_t lanes = 16;
  uint64_t sum[2][lanes] = {{0}}, key[2][lanes];
  for (uint32_t i = 0; i < lanes; ++i)
    for (uint32_t s = 0; s < 2; ++s) key[s][i] = (first + i + 1) * kHashKey[s];
  const auto add = [&](const uint64_t* x) __attribute__((always_inline)) {
    for (uint32_t i = 0; i < lanes; ++i)
      for (uint32_t s = 0; s < 2; ++s) {
        const uint64_t low = uint32_t(x[i] + key[s][i]), high = uint32_t((x[i] >> 32) + (key[s][i] >> 32));
        sum[s][i] += low * high;
        key[s][i] += lanes * kHashKey[s];
      }
  };
  uint64_t x[lanes], at = 0;
  for (; at + lanes <= count; at += lanes) {
    memcpy(x, data + 8 * at, sizeof x);
    add(x);
  }
  for (uint32_t s = 0; s < 2; ++s)
    for (uint32_t i = 0; i < lanes; ++i) sums[s] += sum[s][i];
  for (uint32_t i = 0; at < count; ++at, ++i) {
    uint64_t word;
    memcpy(&word, data + 8 * at, 8);
    for (uint32_t s = 0; s < 2; ++s)
      sums[s] += uint64_t(uint32_t(word + key[s][i])) * uint32_t((word >> 32) + (key[s][i] >> 32));
  }
}

}  // namespace
}  // namespace zipccl
