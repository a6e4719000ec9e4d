// Payloads of row frames that have no scaled rows, in one call (FORMAT.md 2.6).
#include <string.h>

#include "cpu/interface.h"
#include "cpu/rows/row_map.h"

using namespace zipccl;

namespace {

constexpr uint64_t kHeaderBytes = 32, kFieldsBytes = 32;

uint64_t pad16(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

void put32(uint8_t* to, uint64_t value) {
  const uint32_t word = uint32_t(value);
  memcpy(to, &word, 4);
}

// Writes the header of a frame of raw literals, and the literals side by side; returns their bytes.
uint64_t put_raw(const ZipcclRowSegment& segment, const ZipcclLiterals& literals, uint64_t numel, uint8_t* header, int32_t threads) {
  header[5] = 0;  // the codec
  header[9] = 0;  // and its blocks
  const uint64_t row_bytes = literals.width * segment.itemsize, head = literals.head * segment.itemsize;
  const uint64_t all = literals.numel * segment.itemsize, rows_end = head + (all - head) / row_bytes * row_bytes;
  uint8_t* to = header + kHeaderBytes;
  memcpy(to, literals.words, head);
  to += head;
  for (uint64_t i = 0; i < literals.count; ++i, to += row_bytes)
    memcpy(to, literals.words + head + uint64_t(literals.rows[i]) * row_bytes, row_bytes);
  memcpy(to, literals.words + rows_end, all - rows_end);
  uint8_t* const words = header + kHeaderBytes;
  if (segment.mantissa) zipccl_round_words(words, numel, segment.dtype, segment.mantissa, words, threads);
  return numel * segment.itemsize;
}

}  // namespace

uint64_t zipccl_row_frame(ZipcclRowSegment* segment, uint64_t begin, uint64_t numel, uint8_t* out, uint64_t room, int32_t threads) {
  ZipcclSearch& search = segment->search;
  const uint64_t width = segment->width, first = (begin + width - 1) / width, last = (begin + numel) / width;
  if (last > search.first) {
    ZipcclSearch here = search;
    here.sources += here.first;
    here.count = last - here.first;
    segment->repeats += zipccl_find_rows(&here, threads);
    search.first = last;
  }
  if (first >= last || !segment->repeats || room < kFieldsBytes) return 0;
  Repeats rows = {search.data, width, segment->itemsize, first, last - first, search.sources, segment->literals, out + kFieldsBytes,
                        room - kFieldsBytes, 0, 0, 0};
  pack_repeats(&rows);
  const uint64_t left = numel - rows.repeats * width;
  const bool raw = left * segment->itemsize < segment->raw_below;
  const uint64_t at = kFieldsBytes + pad16((rows.count + rows.repeats * rows.bits + 7) / 8);
  const uint64_t saved = (rows.repeats - (raw ? 0 : rows.plain)) * search.row_bytes;  // coded, a row of one word costs next to nothing
  if (double(at + kHeaderBytes) >= segment->worth * double(saved)) return 0;

  const uint64_t head = first * width - begin;
  memset(out, 0, kFieldsBytes);
  put32(out, width);
  put32(out + 4, head);
  put32(out + 8, rows.repeats);
  out[16] = uint8_t(rows.bits);
  // The words are read alone.
  const ZipcclLiterals literals = {const_cast<uint8_t*>(search.data) + begin * segment->itemsize, numel, width, head, rows.literals,
                                   rows.count - rows.repeats};
  uint8_t* const nested = out + at;
  memcpy(nested, segment->nested, sizeof segment->nested);
  const uint64_t bytes = raw ? put_raw(*segment, literals, left, nested, threads)
                             : zipccl_encode_rows(&literals, segment->dtype, segment->code, segment->mantissa, segment->block,
                                                  nested + kHeaderBytes, threads);
  const uint64_t of_header[2] = {left, kHeaderBytes + bytes};
  memcpy(nested + sizeof segment->nested, of_header, sizeof of_header);
  const uint64_t end = at + kHeaderBytes + bytes;
  memset(out + end, 0, pad16(end) - end);
  return pad16(end);
}
