// Scaled payloads for fuzz.cpp, which includes this file behind its own functions: scales and codes in memory of exactly their size.
#pragma once

namespace {

std::string text(const Exact& from, uint64_t size) { return size ? std::string(reinterpret_cast<char*>(from.data), size) : std::string(); }

// Decodes scales and codes at every level, to words and to sums; returns the status.
int32_t scaled_decode(const Case& c, const ZipcclScaling& s, const std::vector<const char*>& levels, const std::string& scales,
                      const std::string& codes, std::string& words) {
  Exact in(codes.size(), below(16)), of(scales.size(), below(16));
  if (in.size()) memcpy(in.data, codes.data(), in.size());
  if (of.size()) memcpy(of.data, scales.data(), of.size());
  const int32_t fp32_sums = int32_t(below(2));
  int32_t status = 0;
  std::string first_sums;
  for (const char* level : levels) {
    zipccl_force_level(level);
    Exact out(c.numel * c.item(), below(16)), sums(c.numel * (fp32_sums ? 4 : c.item()), below(16));
    if (sums.size()) memset(sums.data, 0x3c, sums.size());
    const int32_t now = zipccl_scaled_decode(of.data, in.data, c.numel, c.dtype, &s, out.data, ZIPCCL_WORDS, 1);
    if (now != 0 && now != 12) fail("unknown status of scaled codes", c, level);
    if (zipccl_scaled_decode(of.data, in.data, c.numel, c.dtype, &s, sums.data, ZIPCCL_SUMS + fp32_sums, 1) != now) fail("scaled sums differ in status", c, level);
    if (level != levels[0] && now != status) fail("levels differ in the status of scaled codes", c, level);
    status = now;
    if (now) continue;
    if (level != levels[0] && (text(out, out.size()) != words || text(sums, sums.size()) != first_sums))
      fail("levels decode different scaled words", c, level);
    words = text(out, out.size());
    first_sums = text(sums, sums.size());
  }
  digest(status ? std::string(1, char(status)) : words);
  return status;
}

// Scales, codes and decoded values of the words, the same at every level; then other scales and codes, of which a receiver has proven the
// number and the range of the scales alone. Returns how often codes were refused.
uint64_t scaled_everywhere(const Case& c, const std::vector<const char*>& levels, const Exact& words) {
  const uint32_t integers = uint32_t(below(2)), log2 = uint32_t(5 + below(5)), hadamard = uint32_t(below(2));
  const ZipcclScaling s = {integers, integers ? uint32_t(4 + 2 * below(3)) : 8, log2, hadamard};
  const uint64_t groups = (c.numel + (1ull << log2) - 1) >> log2, each = (uint64_t(s.bits) << log2) / 8, width = integers ? 2 : 1;
  std::string scales, codes, kept, decoded;
  uint64_t coded = 0;
  for (const char* level : levels) {
    zipccl_force_level(level);
    Exact to(groups * width, below(16)), code(groups * each, below(16)), values(words.size(), below(16));
    const uint64_t now = zipccl_scaled_encode(words.data, c.numel, c.dtype, &s, to.data, code.data, 1);
    zipccl_scaled_project(words.data, c.numel, c.dtype, &s, values.data, 1);
    if (now != ~0ull && now > groups) fail("more groups than there are", c, level);
    const bool whole = now != ~0ull;
    const std::string here = whole ? text(code, now * each) : "", front = whole ? text(to, to.size()) : "";
    if (level != levels[0] && (now != coded || here != codes || front != scales || text(values, values.size()) != kept))
      fail("levels scale differently", c, level);
    coded = now;
    codes = here;
    scales = front;
    kept = text(values, values.size());
  }
  digest(scales + codes + kept);
  if (coded == ~0ull) return 0;
  if (scaled_decode(c, s, levels, scales, codes, decoded) || decoded != kept) fail("scaled words are not the projected ones", c, levels[0]);
  uint64_t refused = 0;
  for (int i = 0; i < 6; ++i) {
    std::string other = scales, damaged = codes;
    const uint32_t reach = hadamard ? log2 : 0, limit = integers ? ((256 - s.bits - reach) << 7) - 1 : 246 - reach;
    for (uint64_t at = 0; at < other.size(); at += width) {
      uint16_t scale = 0;
      memcpy(&scale, &other[at], width);
      if (scale && below(2)) scale = uint16_t(below(4) ? 1 + below(limit) : limit);
      memcpy(&other[at], &scale, width);
    }
    for (uint64_t n = below(4) ? below(20) : damaged.size(); n && damaged.size(); --n) damaged[below(damaged.size())] = char(draw());
    refused += scaled_decode(c, s, levels, other, damaged, decoded) != 0;
  }
  return refused;
}

}  // namespace
