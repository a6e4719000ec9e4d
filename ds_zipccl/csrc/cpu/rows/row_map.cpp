// Maps of row frames that have no scaled rows (FORMAT.md 2.6), packed and, by the C interface, read.
#include <algorithm>

#include "common/bits.h"
#include "cpu/interface.h"
#include "cpu/rows/row_map.h"

using namespace zipccl;

namespace {

constexpr uint64_t kProbes = 8;  // words that tell a row of one word
constexpr uint64_t kAhead = 16;  // repeats from which on words are asked for

// Whether the words of a row that are looked at are all equal.
bool looks_plain(const uint8_t* row, uint64_t width, uint64_t itemsize) {
  for (uint64_t i = 1; i < kProbes; ++i)
    if (memcmp(row, row + i * (width - 1) / (kProbes - 1) * itemsize, itemsize)) return false;
  return true;
}

}  // namespace

// Loops without branches on repeats, which come in any order; the rows in `literals` are from the front literal rows, from the back others.
void zipccl::pack_repeats(Repeats* r) {
  const int32_t* const sources = r->sources + r->first;
  const int32_t base = int32_t(r->first);
  uint64_t literals = 0, back = r->count;
  uint32_t farthest = 0;
  for (uint64_t i = 0; i < r->count; ++i) {
    const uint32_t distance = uint32_t(base + int32_t(i) - sources[i]);
    const bool repeats = distance != 0;
    r->literals[repeats ? back - 1 : literals] = int32_t(i);
    literals += !repeats;
    back -= repeats;
    farthest = std::max(farthest, distance);
  }
  const int32_t* const last = r->literals + r->count - 1;  // repeat k is last[-k]
  const uint64_t repeats = r->count - literals, row_bytes = r->width * r->itemsize;
  const auto row = [&](uint64_t k) { return r->words + (r->first + uint64_t(last[-int64_t(k)])) * row_bytes; };
  r->repeats = repeats;
  r->plain = 0;
  for (uint64_t k = 0; k < repeats; ++k) {
    if (k + kAhead < repeats)
      for (uint64_t probe = 0; probe < 2; ++probe) prefetch(row(k + kAhead) + probe * (r->width - 1) / (kProbes - 1) * r->itemsize);
    r->plain += looks_plain(row(k), r->width, r->itemsize);
  }
  r->bits = farthest > 1 ? 64 - uint64_t(__builtin_clzll(uint64_t(farthest) - 1)) : 0;
  const uint64_t bytes = (r->count + r->repeats * r->bits + 7) / 8, padded = (bytes + 15) / 16 * 16;
  if (!r->repeats || padded + 16 > r->room) return;
  BitWriter writer(r->map);
  for (uint64_t i = 0; i < r->count; i += 64) {
    const uint64_t n = std::min<uint64_t>(r->count - i, 64);
    uint64_t marks = 0;
    for (uint64_t j = 0; j < n; ++j) marks |= uint64_t(sources[i + j] != base + int32_t(i + j)) << j;
    writer.put(marks, uint32_t(n));
  }
  for (uint64_t k = 0; k < repeats; ++k) {
    const int32_t i = last[-int64_t(k)];
    writer.put(uint64_t(base + i - sources[i]) - 1, uint32_t(r->bits));
  }
  uint8_t* const end = writer.end();
  memset(end, 0, uint64_t(r->map + padded - end));
}

int32_t zipccl_unpack_repeats(const ZipcclMap* m) {
  const auto marked = [&](uint64_t row) { return m->map[row / 8] >> row % 8 & 1; };
  uint64_t literals = 0, repeats = 0;
  for (uint64_t i = 0; i < m->count; ++i) {
    if (!marked(i)) {
      if (literals == m->count - m->repeats) return 1;
      m->literals[literals++] = int32_t(i);
      continue;
    }
    if (repeats == m->repeats) return 1;
    const uint64_t bit = m->count + repeats * m->bits;
    const uint64_t distance = (load_word<uint64_t>(m->map + bit / 8) >> bit % 8 & ones(uint32_t(m->bits))) + 1;
    if (distance > i + m->reach || (distance <= i && marked(i - distance))) return 1;
    m->repeated[repeats] = int32_t(i + m->reach);
    m->sources[repeats++] = int32_t(i + m->reach - distance);
  }
  return 0;
}
