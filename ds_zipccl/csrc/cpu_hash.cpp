// The C interface of the hash of a region (FORMAT.md section 5).
#include "cpu_chunks.h"

namespace {

uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

}  // namespace

// Hash of `bytes` bytes: two u64 to `hash`.
extern "C" void zipccl_hash(const void* data, uint64_t bytes, uint64_t* hash, int32_t threads) {
  constexpr uint64_t kPiece = 1 << 16;  // bytes that a thread takes at a time
  ZipcclLevel::HashWords* const hash_words = zipccl_chosen().hash;
  const uint8_t* const from = static_cast<const uint8_t*>(data);
  std::atomic<uint64_t> ticket{0}, sums[2] = {{0}, {0}};
  zipccl::on_threads(zipccl::useful_threads(threads, bytes), [&] {
    uint64_t own[2] = {0, 0};
    for (uint64_t at; (at = ticket.fetch_add(kPiece, std::memory_order_relaxed)) < bytes;)
      hash_words(from + at, at / 8, std::min(kPiece, bytes - at) / 8, own);
    for (uint32_t s = 0; s < 2; ++s) sums[s].fetch_add(own[s], std::memory_order_relaxed);
  });
  uint64_t last = 0, all[2] = {sums[0], sums[1]};
  if (bytes % 8) {
    memcpy(&last, from + bytes / 8 * 8, bytes % 8);
    hash_words(reinterpret_cast<const uint8_t*>(&last), bytes / 8, 1, all);
  }
  hash[0] = mix(all[0] + mix(bytes + 1));
  hash[1] = mix(all[1] + mix(bytes + hash[0]));
}
