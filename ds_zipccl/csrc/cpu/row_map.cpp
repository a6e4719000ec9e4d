// The C interface of the maps of row frames that have no scaled rows (FORMAT.md 2.6).
#include <algorithm>

#include "common/bits.h"

using namespace zipccl;

// The whole rows of a frame, first to first + count - 1 of the segment at `words`, and `sources` as zipccl_find_rows wrote them, from row 0
// on. `literals` has room for `count` numbers, from row `first` on, `map` for `room` bytes. The results: rows that repeat, those of them
// whose source has one word only, as far as a few words tell, and bits of a distance.
struct ZipcclRepeats {
  const uint8_t* words;
  uint64_t width, itemsize, first, count;
  const int32_t* sources;
  int32_t* literals;
  uint8_t* map;
  uint64_t room, repeats, plain, bits;
};

// The map of a frame with `count` whole rows, of which `repeats` repeat, by distances of `bits` (at most 32) bits; 16 bytes more are
// readable. The receiver holds `reach` rows in front. The results: the literals, from row 0 of the frame on, the repeated rows and their
// sources, from the first row of the receiver on.
struct ZipcclMap {
  const uint8_t* map;
  uint64_t count, repeats, bits, reach;
  int32_t *literals, *repeated, *sources;
};

namespace {

constexpr uint64_t kProbes = 8;    // words that tell a row of one word

// Whether the words of a row that are looked at are all equal.
bool looks_plain(const uint8_t* row, uint64_t width, uint64_t itemsize) {
  for (uint64_t i = 1; i < kProbes; ++i)
    if (memcmp(row, row + i * (width - 1) / (kProbes - 1) * itemsize, itemsize)) return false;
  return true;
}

}  // namespace

// Writes the literals and the map of a frame without scaled rows (FORMAT.md 2.6), with its padding; no map where it has no room.
extern "C" void zipccl_pack_repeats(ZipcclRepeats* r) {
  const int32_t* const sources = r->sources + r->first;
  uint64_t literals = 0, farthest = 0;
  r->plain = 0;
  for (uint64_t i = 0; i < r->count; ++i) {
    const uint64_t distance = r->first + i - uint64_t(sources[i]);
    r->literals[literals] = int32_t(i);
    literals += !distance;
    farthest = std::max(farthest, distance);
    if (distance) r->plain += looks_plain(r->words + uint64_t(sources[i]) * r->width * r->itemsize, r->width, r->itemsize);
  }
  r->repeats = r->count - literals;
  r->bits = farthest > 1 ? 64 - uint64_t(__builtin_clzll(farthest - 1)) : 0;
  const uint64_t bytes = (r->count + r->repeats * r->bits + 7) / 8, padded = (bytes + 15) / 16 * 16;
  if (!r->repeats || padded + 16 > r->room) return;
  BitWriter writer(r->map);
  for (uint64_t i = 0; i < r->count; i += 64) {
    const uint64_t n = std::min<uint64_t>(r->count - i, 64);
    uint64_t marks = 0;
    for (uint64_t j = 0; j < n; ++j) marks |= uint64_t(uint64_t(sources[i + j]) != r->first + i + j) << j;
    writer.put(marks, uint32_t(n));
  }
  for (uint64_t i = 0; i < r->count; ++i)
    if (uint64_t(sources[i]) != r->first + i) writer.put(r->first + i - uint64_t(sources[i]) - 1, uint32_t(r->bits));
  uint8_t* const end = writer.end();
  memset(end, 0, uint64_t(r->map + padded - end));
}

// Reads the map of a frame without scaled rows. Returns 0, or 1 where the map contradicts itself, its numbers or the rows in front.
extern "C" int32_t zipccl_unpack_repeats(const ZipcclMap* m) {
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
