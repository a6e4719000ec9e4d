// The C interface of the exponent codec on the CPU: whole payloads (FORMAT.md section 2).
#include "cpu/chunks.h"

using namespace zipccl;

// One payload to be encoded: numel words to `out`, which must hold payload_bound() (codecs/exponent.py) bytes; `bytes` is the result.
struct ZipcclSegment {
  const void* words;
  uint64_t numel;
  void* out;
  uint64_t bytes;
};

// Encodes `count` segments of `dtype` with `code` (0 cascade, 1 wide).
extern "C" void zipccl_encode(ZipcclSegment* segments, uint32_t count, int32_t dtype, int32_t code, uint32_t block, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::Encode* const encode_chunk = zipccl_chosen().encode[type][code];
  const uint64_t chunk_bytes = uint64_t(block) * kChunkBlocks * kItemsize[type];
  encode_segments(segments, count, type, block, threads,
                  [&](const ZipcclSegment& segment, uint64_t at, uint32_t numel, void* workspace, ZipcclPart* parts, const uint8_t* soon) {
                    const uint8_t *const words = static_cast<const uint8_t*>(segment.words) + at, *blocks[kChunkBlocks],
                                  *next[2 * kChunkBlocks];
                    for (uint32_t b = 0; b < kChunkBlocks; ++b) blocks[b] = words + b * (chunk_bytes / kChunkBlocks);
                    for (uint32_t i = 0; i < 2 * kChunkBlocks; ++i) next[i] = words + chunk_bytes + i * (chunk_bytes / (2 * kChunkBlocks));
                    return encode_chunk(blocks, numel, block, workspace, parts, soon, next);
                  });
}

// Decodes a payload of `bytes` bytes to numel words of `dtype`. Returns 0 or a FrameErrorCode; the words are then undefined.
extern "C" int32_t zipccl_decode(const void* payload, uint64_t bytes, void* words, uint64_t numel, int32_t dtype, uint32_t block,
                                 int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::Decode* const decode_chunk = zipccl_chosen().decode[type];
  const uint64_t total = numel * kItemsize[type];
  return each_chunk<0>(static_cast<const uint8_t*>(payload), bytes, numel, block, threads, total,
                    [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool) {
                      uint8_t *const to = static_cast<uint8_t*>(words) + first * kItemsize[type], *blocks[kChunkBlocks];
                      for (uint32_t b = 0; b < kChunkBlocks; ++b) blocks[b] = to + uint64_t(b) * block * kItemsize[type];
                      return decode_chunk(chunk, chunk_bytes, n, block, total >= kStreamBytes ? ~0u : 0, blocks);
                    });
}

// Decodes a payload and adds it to numel sums: of `dtype` (1 to 3) itself, each rounded to it, or floats if `fp32_sums`.
extern "C" int32_t zipccl_decode_add(const void* payload, uint64_t bytes, void* sums, uint64_t numel, int32_t dtype, uint32_t block,
                                     int32_t fp32_sums, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::Add* const add_chunk = zipccl_chosen().add[type][fp32_sums != 0];
  const uint32_t itemsize = fp32_sums ? 4 : kItemsize[type];
  return each_chunk<0>(static_cast<const uint8_t*>(payload), bytes, numel, block, threads, numel * kItemsize[type],
                    [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool) {
                      return add_chunk(chunk, chunk_bytes, n, block, static_cast<uint8_t*>(sums) + first * itemsize);
                    });
}

// Adds numel words of `dtype` (1 to 3) to sums: of `dtype` itself, each rounded to it, or floats if `fp32_sums`.
extern "C" void zipccl_add(const void* words, uint64_t numel, void* sums, int32_t dtype, int32_t fp32_sums, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::AddWords* const add_words = zipccl_chosen().add_words[type][fp32_sums != 0];
  const uint64_t itemsize = kItemsize[type], sum_size = fp32_sums ? 4 : itemsize, part = kBytesPerThread / itemsize;
  std::atomic<uint64_t> ticket{0};
  on_threads(useful_threads(threads, numel * itemsize), [&] {
    for (uint64_t first; (first = ticket.fetch_add(part, std::memory_order_relaxed)) < numel;) {
      const uint64_t n = std::min(numel - first, part);
      add_words(static_cast<const uint8_t*>(words) + first * itemsize, n, static_cast<uint8_t*>(sums) + first * sum_size);
    }
  });
}
