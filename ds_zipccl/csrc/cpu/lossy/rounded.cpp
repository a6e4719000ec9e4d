// The C interface of rounded payloads on the CPU (FORMAT.md 2.9).
#include "cpu/chunks.h"
#include "cpu/interface.h"
#include "common/bits.h"
#include "common/rounding.cuh"

using namespace zipccl;

namespace {

// The words of a SPARSE block of n words that are not zero.
uint32_t others_of(const uint8_t* tail, uint32_t n) {
  uint32_t others = n;
  each_group(n, [&](uint32_t at, uint32_t here) { others -= popcount(load_plane(tail + 1, at, here)); });
  return others;
}

// Bytes that a rounded payload, as the encoder wrote it, would have if its blocks had no trims, and RAW blocks stayed RAW.
template <typename F>
uint64_t untrimmed_bytes(const uint8_t* payload, uint64_t numel, uint32_t block) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunks = chunks_of(numel, block);
  uint64_t total = index_bytes(chunks);
  const uint8_t* chunk = payload + total;
  for (uint64_t first = 0; first < numel; first += per_chunk) {
    const uint32_t words = uint32_t(std::min(numel - first, per_chunk)), blocks = (words + block - 1) / block;
    uint64_t tail_at = table_bytes<Trimmed<F>>(blocks), bodies = 0, tails = 0;
    const auto length = [&](uint32_t b) { return std::min(block, words - b * block); };
    const auto entry = [&](uint32_t b) { return load_word<uint16_t>(chunk + blocks + 2 * b); };
    const auto trim = [&](uint32_t b) { return uint32_t(chunk[3 * blocks + b]); };
    for (uint32_t b = 0; b < blocks; ++b) tail_at += body_bytes<F>(entry(b) >> kTailBits, length(b), trim(b));
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t mode = entry(b) >> kTailBits, tail_bytes = entry(b) & ((1u << kTailBits) - 1);
      const uint32_t others = mode == SPARSE ? others_of(chunk + tail_at, length(b)) : 0;
      const Untrimmed size = untrimmed_block<F>(mode, length(b), trim(b), tail_bytes, others);
      bodies += size.body;
      tails += size.tail;
      tail_at += tail_bytes;
    }
    total += table_bytes<F>(blocks) + bodies + (tails + 15) / 16 * 16;
    chunk += (tail_at + 15) / 16 * 16;
  }
  return total;
}

}  // namespace

void zipccl_round_words(const void* words, uint64_t numel, int32_t dtype, uint32_t mantissa, void* out, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::RoundWords* const round_words = zipccl_chosen().round_words[type];
  const uint64_t itemsize = kItemsize[type];
  each_part(numel, kBytesPerThread / itemsize, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    round_words(static_cast<const uint8_t*>(words) + first * itemsize, n, mantissa, static_cast<uint8_t*>(out) + first * itemsize);
  });
}

void zipccl_encode_rounded(ZipcclSegment* segments, uint32_t count, int32_t dtype, uint32_t mantissa, uint32_t block, uint64_t* untrimmed,
                           int32_t threads) {
  const ZipcclType type = type_of(dtype);
  encode_words(segments, count, type, block, threads, zipccl_chosen().encode_rounded[type], mantissa);
  for (uint32_t s = 0; s < count; ++s) {
    const uint8_t* const out = static_cast<const uint8_t*>(segments[s].out);
    untrimmed[s] = type == ZIPCCL_FP32   ? segments[s].bytes
                   : type == ZIPCCL_FP16 ? untrimmed_bytes<Fp16>(out, segments[s].numel, block)
                                         : untrimmed_bytes<Bf16>(out, segments[s].numel, block);
  }
}
