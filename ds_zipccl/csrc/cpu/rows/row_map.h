// Maps of row frames that have no scaled rows (FORMAT.md 2.6).
#pragma once
#include <stdint.h>

namespace zipccl {

// The whole rows of a frame, first to first + count - 1 of the segment at `words`, and `sources` as zipccl_find_rows wrote them, from row 0
// on. `literals` has room for `count` numbers, from row `first` on, `map` for `room` bytes. The results: rows that repeat, those of them
// that have one word only, as far as a few words tell, and bits of a distance.
struct Repeats {
  const uint8_t* words;
  uint64_t width, itemsize, first, count;
  const int32_t* sources;
  int32_t* literals;
  uint8_t* map;
  uint64_t room, repeats, plain, bits;
};

// Writes the literals and the map with its padding; no map where it has no room.
void pack_repeats(Repeats* r);

}  // namespace zipccl
