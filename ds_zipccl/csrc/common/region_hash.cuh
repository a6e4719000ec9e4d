// The constants of the hash of a region (FORMAT.md section 5), host and device.
#pragma once
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kHashWords = 128;  // u64 of a block
constexpr uint64_t kHashStep = 0x9E3779B97F4A7C15ull;

ZIPCCL_FN constexpr uint64_t hash_mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}
// K_j, j = kHashWords * half + i, from the half's key.
ZIPCCL_FN constexpr uint64_t hash_key(uint32_t j, uint64_t key) { return hash_mix((j + 1) * kHashStep + key); }

}  // namespace
}  // namespace zipccl
