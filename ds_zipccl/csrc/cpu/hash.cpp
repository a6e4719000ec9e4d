// The C interface of the hash of a region (FORMAT.md section 5).
#include "cpu/hash.h"

#include "cpu/chunks.h"
#include "cpu/interface.h"

using namespace zipccl;

void zipccl_hash(const void* data, uint64_t bytes, const uint64_t* key, uint64_t* hash, int32_t threads) {
  constexpr uint64_t kBytes = 8 * kHashWords, kPiece = 64;  // of a block; blocks that a thread takes at a time
  ZipcclLevel::HashBlocks* const hash_blocks = zipccl_chosen().hash;
  const uint8_t* const from = static_cast<const uint8_t*>(data);
  const uint64_t blocks = bytes / kBytes, rest = bytes % kBytes;
  const HashKeys keys(key[0], key[1]);
  std::atomic<uint64_t> ticket{0}, sums[2] = {{bytes + keys.of[0][0]}, {bytes + keys.of[1][0]}};
  on_threads(useful_threads(threads, bytes), [&] {
    uint64_t own[2] = {0, 0};
    for (uint64_t at; (at = ticket.fetch_add(kPiece, std::memory_order_relaxed)) < blocks;)
      hash_blocks(keys.of, from + at * kBytes, at, std::min(kPiece, blocks - at), own);
    for (uint32_t h = 0; h < 2; ++h) sums[h].fetch_add(own[h], std::memory_order_relaxed);
  });
  uint64_t all[2] = {sums[0], sums[1]};
  if (rest) {
    uint8_t last[kBytes] = {0};
    memcpy(last, from + blocks * kBytes, rest);
    hash_blocks(keys.of, last, blocks, 1, all);
  }
  for (uint32_t h = 0; h < 2; ++h) hash[h] = hash_mix(all[h]);
}
