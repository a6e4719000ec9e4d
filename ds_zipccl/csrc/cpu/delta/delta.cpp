// The C interface of the delta codec on the CPU: whole payloads (FORMAT.md 2.3).
#include "cpu/chunks.h"
#include "cpu/interface.h"

using namespace zipccl;

namespace {

struct Segment {
  const uint8_t *words, *base;
  uint64_t numel;
  void* out;
  uint64_t bytes;
};

}  // namespace

uint64_t zipccl_delta_encode(const void* words, const void* base, uint64_t numel, void* out, int32_t dtype, uint32_t block,
                             int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::DeltaEncode* const encode_chunk = zipccl_chosen().delta_encode[type];
  Segment one = {static_cast<const uint8_t*>(words), static_cast<const uint8_t*>(base), numel, out, 0};
  encode_segments(&one, 1, type, block, threads,
                  [&](const Segment& segment, uint64_t at, uint32_t n, void* workspace, ZipcclPart* parts, const uint8_t*) {
                    return encode_chunk(segment.words + at, segment.base + at, n, block, workspace, parts);
                  });
  return one.bytes;
}

int32_t zipccl_delta_decode(const void* payload, uint64_t bytes, const void* base, void* words, uint64_t numel, int32_t dtype,
                            uint32_t block, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::DeltaDecode* const decode_chunk = zipccl_chosen().delta_decode[type];
  const uint32_t itemsize = kItemsize[type];
  return each_chunk<kListBit>(static_cast<const uint8_t*>(payload), bytes, numel, block, threads, numel * itemsize,
                    [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool list) {
                      return decode_chunk(chunk, chunk_bytes, list, static_cast<const uint8_t*>(base) + first * itemsize, n, block,
                                          static_cast<uint8_t*>(words) + first * itemsize);
                    });
}
