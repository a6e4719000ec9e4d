// Blocks of the hash of a region (FORMAT.md section 5).
#pragma once
#include "common/region_hash.cuh"

namespace zipccl {
namespace {

struct HashKeys {
  alignas(64) uint64_t of[2][kHashWords];
  constexpr explicit HashKeys(uint64_t first = 0, uint64_t second = 0) : of() {
    for (uint32_t h = 0; h < 2; ++h)
      for (uint32_t i = 0; i < kHashWords; ++i) of[h][i] = hash_key(kHashWords * h + i, h ? second : first);
  }
};
constexpr HashKeys kHashKeys;

// `keys`: HashKeys::of. Adds the contribution of `blocks` blocks at `data` to the sums of the halves; the first block is block `first` of the region.
template <typename Lanes>
void hash_blocks(const uint64_t (*keys)[kHashWords], const uint8_t* data, uint64_t first, uint64_t blocks, uint64_t* sums) {
  for (uint64_t b = 0; b < blocks; ++b, data += 8 * kHashWords) {
    uint64_t here[2];
    Lanes::hash_sums(data, keys[0], keys[1], kHashWords, here);
    for (uint32_t h = 0; h < 2; ++h) sums[h] += hash_mix(here[h] + (first + b + 1) * kHashStep);
  }
}

}  // namespace
}  // namespace zipccl
