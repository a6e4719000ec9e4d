// The C interface of scaled payloads on the CPU (FORMAT.md 2.10): scales and codes of whole tensors. Callers have proven the scales, and
// that there are as many codes as the scales say.
#include "cpu/chunks.h"
#include "cpu/interface.h"
#include "cpu/lossy/denormals.h"

using namespace zipccl;

namespace {

constexpr uint64_t kTile = 1 << 16;  // elements that a thread takes at a time: whole groups
constexpr uint64_t kPart = 1 << 12;  // elements that are decoded before they are added: whole groups that stay in the cache

uint64_t group_bytes(const ZipcclScaling& s) { return (uint64_t(s.bits) << s.log2) / 8; }
uint64_t scale_bytes(const ZipcclScaling& s) { return s.integers ? 2 : 1; }

// Number of scales that are not zero.
uint64_t coded_groups(const uint8_t* scales, uint64_t groups, const ZipcclScaling& s) {
  uint64_t coded = 0;
  for (uint64_t i = 0; i < groups; ++i) {
    uint16_t scale = 0;
    memcpy(&scale, scales + i * scale_bytes(s), scale_bytes(s));
    coded += scale != 0;
  }
  return coded;
}

uint64_t groups_of(uint64_t elements, const ZipcclScaling& s) { return (elements + (1u << s.log2) - 1) >> s.log2; }

// Calls part(scales, codes, first element, elements) for every tile, and returns the worst of their statuses.
template <typename Part>
int32_t each_tile(const uint8_t* scales, const uint8_t* codes, uint64_t numel, uint64_t bytes, const ZipcclScaling& s, int32_t threads,
                  Part part) {
  std::vector<uint64_t> starts;  // of each tile: groups with codes in front of it
  uint64_t coded = 0;
  for (uint64_t first = 0; first < numel; first += kTile) {
    starts.push_back(coded);
    coded += coded_groups(scales + groups_of(first, s) * scale_bytes(s), groups_of(std::min(kTile, numel - first), s), s);
  }
  std::atomic<int32_t> status{OK};
  each_part(numel, kTile, bytes, threads, [&](uint64_t first, uint64_t n) {
    const uint8_t* const from = scales + groups_of(first, s) * scale_bytes(s);
    if (const int32_t failed = part(from, codes + starts[first / kTile] * group_bytes(s), first, n)) status = failed;
  });
  return status;
}

// The first group of each chunk of codes, and the end of the last: `per_chunk` groups with codes each, and the groups without codes that
// follow them or are in front of all. `coded` gets the number of groups with codes. Scales of one byte.
std::vector<uint64_t> chunk_groups(const uint8_t* scales, uint64_t groups, uint64_t per_chunk, uint64_t& coded) {
  std::vector<uint64_t> starts;
  if (!groups || !memchr(scales, 0, groups)) {
    for (uint64_t group = 0; group < groups; group += per_chunk) starts.push_back(group);
    coded = groups;
  } else {
    coded = 0;
    for (uint64_t group = 0; group < groups; ++group)
      if (scales[group] && coded++ % per_chunk == 0) starts.push_back(coded == 1 ? 0 : group);
  }
  starts.push_back(groups);
  return starts;
}

// Decodes the codes of a payload with stage 2, `bytes` bytes in blocks of `block` codes, chunk by chunk, and calls part(scales, codes, first
// element, elements) for each while its codes are in the cache. Returns 0 or a FrameErrorCode: that of stage 2 before one of a part.
template <typename Part>
int32_t each_staged_part(const uint8_t* payload, uint64_t bytes, const uint8_t* scales, uint64_t numel, uint64_t word_bytes,
                         const ZipcclScaling& s, uint32_t block, int32_t threads, Part part) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks;
  uint64_t coded;
  const std::vector<uint64_t> starts = chunk_groups(scales, groups_of(numel, s), per_chunk >> s.log2, coded);
  ZipcclLevel::Decode* const decode_codes = zipccl_chosen().decode[ZIPCCL_E4M3];
  std::atomic<int32_t> worst{OK};
  const int32_t status = each_chunk<0>(
      payload, bytes, coded << s.log2, block, threads, word_bytes,
      [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool) {
        alignas(64) uint8_t codes[kChunkBlocks * kMaxBlock];
        uint8_t* blocks[kChunkBlocks];
        for (uint32_t b = 0; b < kChunkBlocks; ++b) blocks[b] = codes + uint64_t(b) * block;
        const int32_t failed = decode_codes(chunk, chunk_bytes, n, block, 0, blocks);
        if (failed) return failed;
        const uint64_t group = starts[first / per_chunk], end = starts[first / per_chunk + 1], from = group << s.log2;
        if (const int32_t refused = part(scales + group, codes, from, std::min(numel, end << s.log2) - from)) worst = refused;
        return int32_t(OK);
      });
  if (status) return status;
  return coded || !numel ? worst.load() : part(scales, payload, 0, numel);  // all elements are zeros
}

// Decodes scaled words of a type, or adds them to sums.
struct Decoder {
  const ZipcclScaling& s;
  int32_t into;
  uint64_t itemsize, sum_bytes;
  ZipcclLevel::DecodeScaled* decode;
  ZipcclLevel::AddWords* add;
  uint8_t* to;

  Decoder(const ZipcclScaling& scaling, int32_t dtype, uint8_t* out, int32_t words_or_sums)
      : s(scaling),
        into(words_or_sums),
        itemsize(kItemsize[type_of(dtype)]),
        sum_bytes(into == ZIPCCL_FP32_SUMS ? 4 : itemsize),
        decode(zipccl_chosen().decode_scaled[type_of(dtype)]),
        add(zipccl_chosen().add_words[type_of(dtype)][into == ZIPCCL_FP32_SUMS]),
        to(out) {}

  int32_t operator()(const uint8_t* scales, const uint8_t* codes, uint64_t first, uint64_t n) const {
    return into ? sums(scales, codes, first, n) : words(scales, codes, first, n);
  }

 private:
  int32_t words(const uint8_t* scales, const uint8_t* codes, uint64_t first, uint64_t n) const {
    const Denormals on;
    return decode(scales, codes, n, s, to + first * itemsize);
  }

  // Words are added as zipccl_add adds them: with the denormals of this thread.
  int32_t sums(const uint8_t* scales, const uint8_t* codes, uint64_t first, uint64_t n) const {
    alignas(64) uint8_t words[kPart * 4];
    int32_t worst = OK;
    for (uint64_t done = 0; done < n; done += kPart) {
      const uint64_t here = std::min(kPart, n - done);
      {
        const Denormals on;
        if (const int32_t status = decode(scales, codes, here, s, words)) worst = status;
      }
      add(words, here, to + (first + done) * sum_bytes);
      codes += coded_groups(scales, groups_of(here, s), s) * group_bytes(s);
      scales += groups_of(here, s) * scale_bytes(s);
    }
    return worst;
  }
};

}  // namespace

uint64_t zipccl_scaled_encode(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* scales,
                              uint8_t* codes, int32_t threads) {
  const ZipcclScaling s = *scaling;
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::EncodeScaled* const encode = zipccl_chosen().encode_scaled[type];
  const uint64_t itemsize = kItemsize[type], tile_codes = (kTile >> s.log2) * group_bytes(s), tile_scales = (kTile >> s.log2) * scale_bytes(s);
  std::vector<uint64_t> coded((numel + kTile - 1) / kTile);
  std::atomic<bool> stays{false};
  each_part(numel, kTile, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    if (stays.load(std::memory_order_relaxed)) return;
    const Denormals on;
    const uint64_t tile = first / kTile;
    coded[tile] = encode(words + first * itemsize, n, s, scales + tile * tile_scales, codes + tile * tile_codes);
    if (coded[tile] == kGroupStays) stays = true;
  });
  if (stays) return kGroupStays;
  uint64_t total = 0;
  for (uint64_t tile = 0; tile < coded.size(); total += coded[tile++]) {  // groups without codes leave gaps between tiles
    uint8_t *const to = codes + total * group_bytes(s), *const from = codes + tile * tile_codes;
    if (to != from) memmove(to, from, coded[tile] * group_bytes(s));
  }
  return total;
}

uint64_t zipccl_scaled_encode_staged(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint32_t block,
                                     uint8_t* scales, uint8_t* codes, uint8_t* payload, int32_t threads) {
  const ZipcclScaling s = *scaling;
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::EncodeScaled* const encode = zipccl_chosen().encode_scaled[type];
  ZipcclLevel::Encode* const encode_chunk = zipccl_chosen().encode[ZIPCCL_E4M3][ZIPCCL_CASCADE];
  std::atomic<uint64_t> ended{~0ull - 1};  // the result of a chunk that is none
  const uint64_t going = ended;
  ZipcclSegment segment{codes, groups_of(numel, s) << s.log2, payload, 0};
  encode_segments(&segment, 1, ZIPCCL_E4M3, block, threads,
                  [&](const ZipcclSegment&, uint64_t at, uint32_t n, void* workspace, ZipcclPart* parts, const uint8_t* soon) {
                    if (ended.load(std::memory_order_relaxed) != going) return 0u;
                    uint64_t coded;
                    {
                      const Denormals on;
                      coded = encode(words + at * kItemsize[type], std::min<uint64_t>(n, numel - at), s, scales + (at >> s.log2), codes + at);
                    }
                    if (coded << s.log2 != n) {
                      ended = coded == kGroupStays ? kGroupStays : 0;
                      return 0u;
                    }
                    const ChunkPlaces places(codes + at, uint64_t(block) * kChunkBlocks);
                    return encode_chunk(places.blocks, n, block, workspace, parts, soon, places.next);
                  });
  return ended == going ? segment.bytes : ended.load();
}

int32_t zipccl_scaled_decode(const uint8_t* scales, const uint8_t* codes, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling,
                             uint8_t* out, int32_t into, int32_t threads) {
  const Decoder decoder(*scaling, dtype, out, into);
  return each_tile(scales, codes, numel, numel * decoder.itemsize, *scaling, threads, decoder);
}

int32_t zipccl_scaled_decode_staged(const uint8_t* scales, const uint8_t* payload, uint64_t bytes, uint32_t block, uint64_t numel,
                                    int32_t dtype, const ZipcclScaling* scaling, uint8_t* out, int32_t into, int32_t threads) {
  const Decoder decoder(*scaling, dtype, out, into);
  return each_staged_part(payload, bytes, scales, numel, numel * decoder.itemsize, *scaling, block, threads, decoder);
}

void zipccl_scaled_project(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* out,
                           int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const uint64_t itemsize = kItemsize[type];
  ZipcclLevel::ProjectScaled* const project = zipccl_chosen().project_scaled[type];
  each_part(numel, kTile, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    const Denormals on;
    project(words + first * itemsize, n, *scaling, out + first * itemsize);
  });
}
