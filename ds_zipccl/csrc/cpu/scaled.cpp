// The C interface of scaled payloads on the CPU (FORMAT.md 2.10): scales and codes of whole tensors. Callers have proven the scales, and
// that there are as many codes as the scales say.
#include "cpu/chunks.h"
#include "cpu/denormals.h"

using namespace zipccl;

namespace {

constexpr uint64_t kTile = 1 << 16;  // elements that a thread takes at a time: whole groups
constexpr uint64_t kPart = 1 << 12;  // elements that are decoded before they are added: whole groups that stay in the cache

uint64_t group_bytes(const ZipcclScaling& s) { return (uint64_t(s.bits) << s.log2) / 8; }
uint64_t scale_bytes(const ZipcclScaling& s) { return s.integers ? 2 : 1; }

// Calls work(first element, elements) for every tile, on as many threads as so many bytes are worth.
template <typename Work>
void each_tile(uint64_t numel, uint64_t bytes, int32_t threads, Work work) {
  std::atomic<uint64_t> ticket{0};
  on_threads(useful_threads(threads, bytes), [&] {
    for (uint64_t first; (first = ticket.fetch_add(kTile, std::memory_order_relaxed)) < numel;) work(first, std::min(kTile, numel - first));
  });
}

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

// Decodes a part of `numel` elements, whole groups but for the last: calls part(scales, codes, first element, elements) for pieces of `most`
// elements in each tile, and returns the worst of their statuses.
template <typename Part>
int32_t each_part(const uint8_t* scales, const uint8_t* codes, uint64_t numel, uint64_t bytes, const ZipcclScaling& s, uint64_t most,
                  int32_t threads, Part part) {
  const auto groups = [&](uint64_t elements) { return (elements + (1u << s.log2) - 1) >> s.log2; };
  std::vector<uint64_t> starts;  // of each tile: groups with codes in front of it
  uint64_t coded = 0;
  for (uint64_t first = 0; first < numel; first += kTile) {
    starts.push_back(coded);
    coded += coded_groups(scales + groups(first) * scale_bytes(s), groups(std::min(kTile, numel - first)), s);
  }
  std::atomic<int32_t> status{OK};
  each_tile(numel, bytes, threads, [&](uint64_t first, uint64_t n) {
    uint64_t at = starts[first / kTile];
    for (uint64_t done = 0; done < n; done += most) {
      const uint64_t here = std::min(most, n - done);
      const uint8_t* const from = scales + groups(first + done) * scale_bytes(s);
      if (const int32_t failed = part(from, codes + at * group_bytes(s), first + done, here)) status = failed;
      at += done + most < n ? coded_groups(from, groups(here), s) : 0;
    }
  });
  return status;
}

}  // namespace

// Writes the scales of numel words of `dtype` (1 to 3), one for each group, and the codes of those groups whose scale is not zero; `codes`
// has room for those of all groups. Returns the number of groups with codes, or kGroupStays.
extern "C" uint64_t zipccl_scaled_encode(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* scales,
                                         uint8_t* codes, int32_t threads) {
  const ZipcclScaling s = *scaling;
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::EncodeScaled* const encode = zipccl_chosen().encode_scaled[type];
  const uint64_t itemsize = kItemsize[type], tile_codes = (kTile >> s.log2) * group_bytes(s), tile_scales = (kTile >> s.log2) * scale_bytes(s);
  std::vector<uint64_t> coded((numel + kTile - 1) / kTile);
  std::atomic<bool> stays{false};
  each_tile(numel, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
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

// Decodes to numel words of `dtype`. Returns 0 or a FrameErrorCode.
extern "C" int32_t zipccl_scaled_decode(const uint8_t* scales, const uint8_t* codes, uint64_t numel, int32_t dtype,
                                        const ZipcclScaling* scaling, uint8_t* words, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const uint64_t itemsize = kItemsize[type];
  ZipcclLevel::DecodeScaled* const decode = zipccl_chosen().decode_scaled[type];
  return each_part(scales, codes, numel, numel * itemsize, *scaling, kTile, threads,
                   [&](const uint8_t* from, const uint8_t* code, uint64_t first, uint64_t n) {
                     const Denormals on;
                     return decode(from, code, n, *scaling, words + first * itemsize);
                   });
}

// Decodes and adds to numel sums: of `dtype` itself, each rounded to it, or floats if `fp32_sums`. Words are added as zipccl_add adds them:
// with the denormals of this thread.
extern "C" int32_t zipccl_scaled_add(const uint8_t* scales, const uint8_t* codes, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling,
                                     uint8_t* sums, int32_t fp32_sums, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const uint64_t itemsize = kItemsize[type], sum_bytes = fp32_sums ? 4 : itemsize;
  ZipcclLevel::DecodeScaled* const decode = zipccl_chosen().decode_scaled[type];
  ZipcclLevel::AddWords* const add = zipccl_chosen().add_words[type][fp32_sums != 0];
  return each_part(scales, codes, numel, numel * itemsize, *scaling, kPart, threads,
                   [&](const uint8_t* from, const uint8_t* code, uint64_t first, uint64_t n) {
                     alignas(64) uint8_t words[kPart * 4];
                     int32_t status;
                     {
                       const Denormals on;
                       status = decode(from, code, n, *scaling, words);
                     }
                     add(words, n, sums + first * sum_bytes);
                     return status;
                   });
}

// Writes the decoded values of numel words of `dtype` to `out`, which may be `words`; groups that stay as they are, as they are.
extern "C" void zipccl_scaled_project(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* out,
                                      int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const uint64_t itemsize = kItemsize[type];
  ZipcclLevel::ProjectScaled* const project = zipccl_chosen().project_scaled[type];
  each_tile(numel, numel * itemsize, threads, [&](uint64_t first, uint64_t n) {
    const Denormals on;
    project(words + first * itemsize, n, *scaling, out + first * itemsize);
  });
}
