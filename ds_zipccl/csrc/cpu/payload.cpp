// The C interface of the exponent codec on the CPU: whole payloads (FORMAT.md section 2).
#include "cpu/chunks.h"
#include "cpu/interface.h"

using namespace zipccl;

void zipccl_encode(ZipcclSegment* segments, uint32_t count, int32_t dtype, int32_t code, uint32_t block, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  encode_words(segments, count, type, block, threads, zipccl_chosen().encode[type][code]);
}

int32_t zipccl_decode(const void* payload, uint64_t bytes, void* out, uint64_t numel, int32_t dtype, int32_t rounded, uint32_t block,
                      int32_t into, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const ZipcclLevel& level = zipccl_chosen();
  const uint64_t itemsize = kItemsize[type], total = numel * itemsize, size = into == ZIPCCL_FP32_SUMS ? 4 : itemsize;
  ZipcclLevel::Decode* const decode_chunk = rounded ? level.decode_rounded[type] : level.decode[type];
  ZipcclLevel::Add* const add_chunk = !into ? nullptr : (rounded ? level.add_rounded : level.add)[type][into == ZIPCCL_FP32_SUMS];
  return each_chunk<0>(static_cast<const uint8_t*>(payload), bytes, numel, block, threads, total,
                       [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool) {
                         uint8_t *const to = static_cast<uint8_t*>(out) + first * size, *blocks[kChunkBlocks];
                         if (into) return add_chunk(chunk, chunk_bytes, n, block, to);
                         for (uint32_t b = 0; b < kChunkBlocks; ++b) blocks[b] = to + uint64_t(b) * block * itemsize;
                         return decode_chunk(chunk, chunk_bytes, n, block, total >= kStreamBytes ? ~0u : 0, blocks);
                       });
}

void zipccl_add(const void* words, uint64_t numel, void* sums, int32_t dtype, int32_t fp32_sums, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::AddWords* const add_words = zipccl_chosen().add_words[type][fp32_sums != 0];
  const uint64_t itemsize = kItemsize[type], sum_size = fp32_sums ? 4 : itemsize;
  each_part(numel, kBytesPerThread / itemsize, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    add_words(static_cast<const uint8_t*>(words) + first * itemsize, n, static_cast<uint8_t*>(sums) + first * sum_size);
  });
}

void zipccl_squared_error(const void* words, const void* values, uint64_t numel, int32_t dtype, double* sums, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::AddSquaredError* const add_squared_error = zipccl_chosen().add_squared_error[type];
  const uint64_t itemsize = kItemsize[type], part = kBytesPerThread / itemsize;
  std::vector<double> parts(2 * ((numel + part - 1) / part));
  each_part(numel, part, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    add_squared_error(static_cast<const uint8_t*>(words) + first * itemsize, static_cast<const uint8_t*>(values) + first * itemsize, n,
                      &parts[2 * (first / part)]);
  });
  sums[0] = sums[1] = 0;
  for (uint64_t i = 0; i < parts.size(); ++i) sums[i % 2] += parts[i];
}
