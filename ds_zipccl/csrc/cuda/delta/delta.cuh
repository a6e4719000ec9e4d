// The CHANGE block of delta payloads for CUDA (FORMAT.md 2.4 and section 3): a warp codes the words of a block against their base, a row at
// a time. Planes are bit strings over the elements that are marked for them, so that counts of marks give every address.
#pragma once
#include "common/change_block.cuh"
#include "cuda/decode_block.cuh"
#include "cuda/encode_block.cuh"

namespace zipccl {
namespace {

// The change of a base: its size and sign.
struct Change {
  uint32_t size;
  bool negative;
};
template <typename F>
ZIPCCL_DEVICE Change change_of(typename F::Word word, typename F::Word base) {
  using Word = typename F::Word;
  const Word d = Word(order_of(word) - order_of(base));
  const bool negative = d >> (8 * sizeof(Word) - 1);
  return {negative ? uint32_t(Word(0 - d)) : uint32_t(d), negative};
}

// Low bits of an element's change, by its base and the block's scale.
template <typename F>
ZIPCCL_DEVICE uint32_t low_bits_of(typename F::Word base, uint32_t top) {
  const uint32_t e = F::exponent(base);
  return e == 0 || top <= e ? 0 : least(top - e, Scale<F>::shifts);
}

// A lane's bits of one row among those of a plane, and where they are in its string.
ZIPCCL_DEVICE void put_marked(uint8_t* string, uint32_t at, uint32_t marks, uint32_t bits) {
  uint32_t close = 0, count = 0;
  for (; marks; marks &= marks - 1, ++count) close |= uint32_t((bits & marks & -marks) != 0) << count;
  put_bits(string, at, close);
}
ZIPCCL_DEVICE uint32_t get_marked(const BitString& string, uint32_t at, uint32_t marks) {
  uint32_t close = string.read(at, at + uint32_t(__popc(marks))), bits = 0;
  for (; marks; marks &= marks - 1, close >>= 1)
    if (close & 1) bits |= marks & -marks;
  return bits;
}

// A row's groups of 4, 8 or 16: the place of this lane's first group among all, and its groups as marks of elements.
ZIPCCL_DEVICE uint32_t group_at(uint32_t row, uint32_t group) { return (row * kRow + 8 * lane_id()) / group; }
ZIPCCL_DEVICE uint32_t live_marks(uint32_t some, uint32_t group, uint32_t neighbour) {  // `some`: elements that make their group live
  if (group == 4) return ((some & 0x0f) ? 0x0fu : 0u) | ((some & 0xf0) ? 0xf0u : 0u);
  return (group == 16 ? some | neighbour : some) ? 0xffu : 0u;
}

// Elements of each row that are in a live group, where `changed` are those that have a level; a byte for each row.
ZIPCCL_DEVICE uint32_t live_elements(uint32_t changed, uint32_t group, Part extent) {
  const uint32_t neighbour = __shfl_sync(kEveryLane, changed, lane_id() ^ 1);
  uint32_t live = 0;
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t marks = group == 1 ? 0xffu : live_marks(changed >> 8 * row & 255, group, neighbour >> 8 * row & 255);
    live |= (marks & low_ones(extent.length(row))) << 8 * row;
  }
  return live;
}

// The group size with the fewest bits of groups and level 1 of n elements, of which those in `changed` have a level; and the elements that
// are in a live group.
struct Grouping {
  uint32_t size, live, bits;
};
ZIPCCL_DEVICE Grouping fewest_bits(uint32_t changed, Part extent) {
  Grouping best = {1, live_elements(changed, 1, extent), extent.n};
  for (uint32_t size = 4; size <= 16; size *= 2) {
    const uint32_t live = live_elements(changed, size, extent);
    const uint32_t bits = (extent.n + size - 1) / size + __reduce_add_sync(kEveryLane, uint32_t(__popc(live)));
    if (bits < best.bits) best = {size, live, bits};
  }
  return best;
}

// The bytes of a tail but for its escaped words.
ZIPCCL_DEVICE uint32_t tail_bits_bytes(uint32_t bits) { return 1 + (bits + 7) / 8; }

// The shifts of a block: marks of the elements that have one, their sum, and the largest.
struct Shifts {
  uint32_t marks = 0, sum = 0, most = 0;
};
// Shifts of this lane's elements to its octets of `list`.
template <typename F>
ZIPCCL_DEVICE Shifts list_shifts(const typename F::Word* bases, Part extent, uint32_t top, uint8_t* list) {
  Shifts all;
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t at = row * kRow + 8 * lane_id(), length = extent.length(row);
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t k = i < length ? low_bits_of<F>(bases[at + i], top) : 0;
      list[at + i] = uint8_t(k);
      if (k) all.marks |= 1u << (8 * row + i);
      all.sum += k;
      all.most = k > all.most ? k : all.most;
    }
  }
  return all;
}

// The bytes of `shifts` that are over `bit`, as marks.
ZIPCCL_DEVICE uint32_t over(const Bytes8& shifts, uint32_t bit) {
  const uint32_t add = (127 - bit) * kEachByte;
  return plane_of({{shifts.half[0] + add, shifts.half[1] + add}}, 7);
}

// Writes one plane for the elements in `marks`; returns the place after it.
ZIPCCL_DEVICE uint32_t put_plane(uint8_t* string, uint32_t at, uint32_t marks, uint32_t bits) {
  const Places places(marks);
  for (uint32_t row = 0; row < kRows; ++row) put_marked(string, at + places.of(row), marks >> 8 * row & 255, bits >> 8 * row & 255);
  return at + places.count;
}

// Codes a block against its base to `slot`, as CHANGE or as without a base; `list` has room for a byte of each element.
template <typename F>
ZIPCCL_DEVICE Form encode_change(const typename F::Word* words, const typename F::Word* bases, uint32_t n, uint8_t* slot, uint8_t* list) {
  using Word = typename F::Word;
  const Part extent{n};
  const Word head = words[0];
  uint32_t changed = 0, size_sum = 0, own = 0, escapes = 0, zeros = 0, any = 0;
  bool same = true;
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t at = row * kRow + 8 * lane_id(), length = extent.length(row);
    for (uint32_t i = 0; i < length; ++i) {
      const Word word = words[at + i], base = bases[at + i];
      const Change change = change_of<F>(word, base);
      same &= word == head;
      zeros += Word(word << 1) == 0;
      any |= word;
      if (!change.size) continue;
      changed |= 1u << (8 * row + i);
      if (F::E) size_sum += F::exponent(base) + least(31 - uint32_t(__clz(int(change.size))), Scale<F>::shifts);
      own += 1 + least(change.size, kLevels - 1);
      escapes += change.size >= kLevels;
    }
  }
  const uint32_t count = __reduce_add_sync(kEveryLane, uint32_t(__popc(changed)));
  const uint32_t sum = F::E ? __reduce_add_sync(kEveryLane, size_sum) : 0;
  if (count == 0) return {CHANGE, 0, 0, 0, 0};
  if (__all_sync(kEveryLane, same)) return encode_fill(head, slot);

  // The tail with a top of 0, where an unchanged element has no sign and no low bits.
  const uint32_t plain = tail_bits_bytes(fewest_bits(changed, extent).bits + __reduce_add_sync(kEveryLane, own)) +
                         __reduce_add_sync(kEveryLane, escapes) * uint32_t(sizeof(Word));

  const uint32_t trim = F::has_trim ? least(uint32_t(__ffs(int(__reduce_or_sync(kEveryLane, any)))) - 1, F::M) : 0;
  const uint32_t alone_bytes = least_alone_bytes<F>(n, F::E ? __reduce_add_sync(kEveryLane, zeros) : 0, trim);

  // Shifts, levels and signs of this lane's elements, at the mean scale or, where the tail is then shorter, without one.
  uint32_t top = F::E ? least(255, (8 * sum + Scale<F>::bias * count) / (8 * count)) : 0;
  Shifts shifts;
  Grouping group;
  uint32_t levels[kLevels], negative, tail;
  for (;; top = 0) {
    shifts = list_shifts<F>(bases, extent, top, list);
#pragma unroll
    for (uint32_t level = 0; level < kLevels; ++level) levels[level] = 0;
    negative = 0;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t at = row * kRow + 8 * lane_id(), length = extent.length(row);
      for (uint32_t i = 0; i < length; ++i) {
        const Change change = change_of<F>(words[at + i], bases[at + i]);
        const uint32_t q = change.size >> list[at + i], mark = 1u << (8 * row + i);
#pragma unroll
        for (uint32_t level = 0; level < kLevels; ++level)
          if (q > level) levels[level] |= mark;
        if (change.negative) negative |= mark;
      }
    }
    group = fewest_bits(levels[0], extent);
    own = shifts.sum + uint32_t(__popc(levels[0] | shifts.marks));
#pragma unroll
    for (uint32_t level = 0; level + 1 < kLevels; ++level) own += uint32_t(__popc(levels[level]));
    tail = tail_bits_bytes(group.bits + __reduce_add_sync(kEveryLane, own)) +
           __reduce_add_sync(kEveryLane, uint32_t(__popc(levels[kLevels - 1]))) * uint32_t(sizeof(Word));
    if (tail <= plain || top == 0) break;
  }

  if (tail >= alone_bytes) {
    if constexpr (F::E == 0) {
      return {RAW, 0, 0, alone_bytes, 0};
    } else {
      const Form alone = encode_block<F, Cascade>(words, extent, AsTheyAre(), slot, list);
      if (alone.body + alone.tail <= tail) return alone;
      // The list was lent: put the shifts back. No register keeps them or the group meanwhile.
      __syncwarp();
      shifts = list_shifts<F>(bases, extent, top, list);
    }
  }
  const uint32_t most = __reduce_max_sync(kEveryLane, shifts.most), escaped = levels[kLevels - 1];
  __syncwarp();
  for (uint32_t i = lane_id(); i < (tail + 3) / 4; i += kLanes) reinterpret_cast<uint32_t*>(slot)[i] = 0;
  __syncwarp();
  if (lane_id() == 0) slot[0] = uint8_t(group.size > 1 ? __ffs(int(group.size)) - 2 : 0);
  __syncwarp();

  uint32_t at = 8;
  if (group.size > 1) {
    const uint32_t neighbour = __shfl_sync(kEveryLane, levels[0], lane_id() ^ 1);
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t some = levels[0] >> 8 * row & 255, marks = live_marks(some, group.size, neighbour >> 8 * row & 255);
      if (!extent.length(row) || (group.size == 16 && lane_id() % 2)) continue;
      put_bits(slot, at + group_at(row, group.size), group.size == 4 ? (marks & 1) | (marks >> 4 & 1) << 1 : marks & 1);
    }
    at += (n + group.size - 1) / group.size;
  }
  at = put_plane(slot, at, group.live, levels[0]);
#pragma unroll
  for (uint32_t level = 1; level < kLevels; ++level) at = put_plane(slot, at, levels[level - 1], levels[level]);
  at = put_plane(slot, at, levels[0] | shifts.marks, negative);
  for (uint32_t p = 0; p < most; ++p) {
    uint32_t marks = 0, low = 0;
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t first = row * kRow + 8 * lane_id();
      const uint32_t here = over(*reinterpret_cast<const Bytes8*>(list + first), p);
      marks |= here << 8 * row;
      for (uint32_t left = here; left; left &= left - 1) {
        const uint32_t i = uint32_t(__ffs(int(left))) - 1;
        low |= (change_of<F>(words[first + i], bases[first + i]).size >> p & 1) << (8 * row + i);
      }
    }
    at = put_plane(slot, at, marks, low);
  }
  const Places places(escaped);
  const uint32_t words_at = tail - places.count * uint32_t(sizeof(Word));
  __syncwarp();  // bits of other lanes are in the first byte's word
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t to = words_at + places.of(row) * uint32_t(sizeof(Word));
    for (uint32_t left = escaped >> 8 * row & 255; left; left &= left - 1)
      for (uint32_t byte = 0; byte < sizeof(Word); ++byte)
        slot[to++] = uint8_t(words[row * kRow + 8 * lane_id() + uint32_t(__ffs(int(left))) - 1] >> 8 * byte);
  }
  __syncwarp();
  return {CHANGE, top, 0, 0, tail};
}

// The reader of a tail: the place of the next plane, and whether all planes so far lie in the tail.
struct Planes {
  const BitString string;
  uint32_t at, end;
  bool good;

  // The bits of the elements in `marks`.
  ZIPCCL_DEVICE uint32_t next(uint32_t marks) {
    const Places places(marks);
    good = good && at + places.count <= end;
    uint32_t bits = 0;
    if (good)
      for (uint32_t row = 0; row < kRows; ++row) bits |= get_marked(string, at + places.of(row), marks >> 8 * row & 255) << 8 * row;
    at += places.count;
    return bits;
  }
};

// Decodes a CHANGE tail of `bytes` bytes against n bases to `words`, which may be the same memory. Returns whether it is good.
template <typename F>
ZIPCCL_DEVICE bool decode_change(const uint8_t* tail, uint32_t bytes, const typename F::Word* bases, uint32_t n, uint32_t top,
                                 DecodeScratch<F>& scratch, typename F::Word* words) {
  using Word = typename F::Word;
  const Part extent{n};
  if (bytes == 0) {
    for (uint32_t i = lane_id(); i < n; i += kLanes) words[i] = bases[i];
    return true;
  }
  if (tail[0] > 3) return false;
  const uint32_t group = tail[0] ? 2u << tail[0] : 1;
  Planes planes{BitString(tail), 8, 8 * bytes, true};
  uint8_t* const list = scratch.list[0];

  uint32_t live = 0;
  const Shifts shifts = list_shifts<F>(bases, extent, top, list);
  const uint32_t most = __reduce_max_sync(kEveryLane, shifts.most);
  for (uint32_t row = 0; row < kRows; ++row)
    for (uint32_t i = 0; i < 8; ++i) scratch.words[row * kRow + 8 * lane_id() + i] = 0;

  const uint32_t groups = group > 1 ? (n + group - 1) / group : 0;
  if (8 + groups > planes.end) return false;
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t marks = 0xff;
    if (group > 1 && extent.length(row)) {
      const uint32_t at = 8 + group_at(row, group), bits = planes.string.read(at, 8 + groups);
      marks = group == 4 ? (bits & 1) * 0x0f | (bits >> 1 & 1) * 0xf0 : (bits & 1) * 0xff;
    }
    live |= (marks & low_ones(extent.length(row))) << 8 * row;
  }
  planes.at += groups;

  uint32_t levels[kLevels];
  levels[0] = planes.next(live);
#pragma unroll
  for (uint32_t level = 1; level < kLevels; ++level) levels[level] = planes.next(levels[level - 1]);
  const uint32_t negative = planes.next(levels[0] | shifts.marks);
  for (uint32_t p = 0; p < most; ++p) {  // low bits gather in the scratch, at the places of the lane's words
    uint32_t marks = 0;
    for (uint32_t row = 0; row < kRows; ++row)
      marks |= over(*reinterpret_cast<const Bytes8*>(list + row * kRow + 8 * lane_id()), p) << 8 * row;
    const uint32_t low = planes.next(marks);
    for (uint32_t row = 0; row < kRows; ++row)
      for (uint32_t left = low >> 8 * row & 255; left; left &= left - 1)
        scratch.words[row * kRow + 8 * lane_id() + uint32_t(__ffs(int(left))) - 1] |= Word(Word(1) << p);
  }
  const uint32_t escaped = levels[kLevels - 1], words_at = (planes.at + 7) / 8;
  const Places places(escaped);
  if (!planes.good || words_at + places.count * sizeof(Word) != bytes) return false;

  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t first = row * kRow + 8 * lane_id(), length = extent.length(row);
    uint32_t from = words_at + places.of(row) * uint32_t(sizeof(Word));
    for (uint32_t i = 0; i < length; ++i) {
      const uint32_t bit = 8 * row + i;
      uint32_t q = 0;
#pragma unroll
      for (uint32_t level = 0; level < kLevels; ++level) q += levels[level] >> bit & 1;
      Word word = 0;
      if (q == kLevels) {
        for (uint32_t byte = 0; byte < sizeof(Word); ++byte) word |= Word(Word(tail[from++]) << 8 * byte);
      } else {
        const Word size = Word(q << list[first + i] | scratch.words[first + i]), order = order_of(bases[first + i]);
        word = word_of(Word(negative >> bit & 1 ? order - size : order + size));
      }
      words[first + i] = word;
    }
  }
  return true;
}

}  // namespace
}  // namespace zipccl
