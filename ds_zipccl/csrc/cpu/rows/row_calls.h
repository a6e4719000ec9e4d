// The C interface of row frames on the CPU (FORMAT.md 2.6). The callers have checked that every row lies in its memory.
#pragma once
#include <stdint.h>

// Rows to look for: rows first to first + count - 1, of `row_bytes` each, row 0 at `data`. `table` has `slots` entries, a power of 2 and
// at least twice as many as there are rows. `mask`: the bits of hashes that count.
struct ZipcclSearch {
  const uint8_t* data;
  uint64_t row_bytes, first, count;
  int32_t* sources;
  uint32_t* table;
  uint64_t slots, mask;
};

// The literals of a frame of numel words: the first `head`, then `count` of the rows of `width` words behind them, in ascending order, then
// the words behind the last whole row.
struct ZipcclLiterals {
  uint8_t* words;
  uint64_t numel, width, head;
  const int32_t* rows;
  uint64_t count;
};

// The whole rows of a frame, first to first + count - 1 of the segment at `words`, and `sources` as zipccl_find_rows wrote them, from row 0
// on. `literals` has room for `count` numbers, from row `first` on, `map` for `room` bytes. The results: rows that repeat, those of them
// that have one word only, as far as a few words tell, and bits of a distance.
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

// A segment whose frames are made one after the other, in order. Of `search`, `first` rows have been seen, of which `repeats` repeat
// earlier ones; `sources` is that of row 0. `literals` has room for as many numbers as a frame has rows. `nested`: the first half of the
// header of a frame of literals, of `dtype`, with `code` and `block`, rounded to `mantissa` bits unless that is zero. Literals of fewer
// bytes than `raw_below` are not for zipccl_row_frame. A row frame saves `worth` of the bytes of its repeated rows, or there is none.
struct ZipcclRowSegment {
  ZipcclSearch search;
  uint64_t repeats, width, itemsize, raw_below;
  double worth;
  int32_t* literals;
  uint8_t nested[16];
  int32_t dtype, code;
  uint32_t block, mantissa;
};

extern "C" {
uint64_t zipccl_find_rows(const ZipcclSearch* search, int32_t threads);
uint64_t zipccl_encode_rows(const ZipcclLiterals* literals, int32_t dtype, int32_t code, uint32_t block, void* out, int32_t threads);
uint64_t zipccl_encode_rounded_rows(const ZipcclLiterals* literals, int32_t dtype, uint32_t mantissa, uint32_t block, void* out,
                                    int32_t threads);
void zipccl_pack_repeats(ZipcclRepeats* repeats);
int32_t zipccl_unpack_repeats(const ZipcclMap* map);
uint64_t zipccl_row_frame(ZipcclRowSegment* segment, uint64_t begin, uint64_t numel, uint8_t* out, uint64_t room, int32_t threads);
}
