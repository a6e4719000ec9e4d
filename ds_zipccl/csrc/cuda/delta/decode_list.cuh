// Decodes LIST chunks (FORMAT.md 2.5). No byte is read before it is proven to lie in the chunk, and no word is written before all places are
// proven to lie in their sets (section 4).
#pragma once
#include "cuda/delta/gap_list.cuh"

namespace zipccl {
namespace {

// The scratch of a decoder.
struct ListScratch {
  uint16_t place[kListWords];                            // of the words of level 1, in the chunk
  alignas(16) uint8_t level[kLevels - 1][kListWords / 8];  // bit planes: the words of a level that are also in the next
  uint16_t before[kLevels - 1][kListWords / 32];         // the ones of a plane before each of its u32
  Told told[2];
  uint32_t m[kLevels], r[kLevels], low_at[kLevels];
  uint32_t first[kLanes];           // the number of a level's first gap among those of all levels; all that are not of a level: their end
  uint32_t rest_before[kLevels], low_before[kLevels];  // bits of `rest`, and sum of low bits, before a level
  uint32_t levels, words_at, sign_at, rest_at, good;
};

// A warp reads the head of a LIST of n words. Every field is checked before a sum or a length is made of it.
template <typename F>
ZIPCCL_DEVICE void open_list(const uint8_t* chunk, uint64_t bytes, uint32_t n, ListScratch& scratch) {
  const uint32_t lane = lane_id(), levels = bytes ? chunk[0] : 0;
  bool good = bytes % 16 == 0 && levels >= 1 && levels <= kLevels && list_set_at(levels) <= bytes;
  uint32_t m = 0, r = 0;
  if (good && lane < levels) {
    const uint8_t* const set = chunk + list_set_at(lane);
    m = set[0] | uint32_t(set[1]) << 8, r = set[2];
  }
  const uint32_t before = __shfl_sync(kEveryLane, m, (lane - 1) % kLanes), most = lane ? before : n / 4;
  if (good && lane < levels) good = m >= 1 && m <= most && r <= kMaxRice;
  good = __all_sync(kEveryLane, good);
  if (!good) m = r = 0;
  const uint32_t words_at = list_set_at(levels), escapes = __shfl_sync(kEveryLane, m, kLevels - 1);
  const uint32_t low_first = 8 * (words_at + escapes * uint32_t(sizeof(typename F::Word)));
  const uint32_t sign_at = low_first + __reduce_add_sync(kEveryLane, m * r), rest_at = sign_at + __shfl_sync(kEveryLane, m, 0);
  const uint32_t low_at = low_first + sum_below(m * r);
  scratch.first[lane] = sum_below(m);
  if (lane < kLevels) scratch.m[lane] = m, scratch.r[lane] = r, scratch.low_at[lane] = low_at;
  if (lane) return;
  scratch.levels = levels, scratch.words_at = words_at, scratch.sign_at = sign_at, scratch.rest_at = rest_at;
  scratch.good = good && rest_at <= 8 * bytes;
}

// The ones of a thread's part of `rest`, bits `begin` to `end` of it, of which the first is number `number` of all.
struct OwnOnes {
  const ListScratch& scratch;
  const BitString string;
  uint32_t begin, end, number;

  // Calls each(level, number in the level, bits of `rest` before the one, low bits of the gap).
  template <typename Each>
  ZIPCCL_DEVICE void each(Each next) const {
    uint32_t level = 0, one = number;
#pragma unroll 1
    for (uint32_t at = begin; at < end; at += 32) {
#pragma unroll 1
      for (uint32_t bits = string.read(scratch.rest_at + at, scratch.rest_at + end); bits; bits &= bits - 1, ++one) {
        while (one >= scratch.first[level + 1]) ++level;
        const uint32_t in_level = one - scratch.first[level], r = scratch.r[level];
        const uint32_t low = string.peek(scratch.low_at[level] + in_level * r, r) & low_ones(r);
        next(level, in_level, at + uint32_t(__ffs(int(bits))) - 1, low);
      }
    }
  }
};

// Decodes a LIST of `bytes` bytes, at a multiple of 16, against n bases to `words`, which may be the same memory. All threads of the block
// call it. Returns whether the LIST is good; all threads get the same.
template <typename F>
ZIPCCL_DEVICE bool decode_list(const uint8_t* chunk, uint64_t bytes, const typename F::Word* bases, uint32_t n, typename F::Word* words,
                               ListScratch& scratch) {
  using Word = typename F::Word;
  if (warp_id() == 0) open_list<F>(chunk, bytes, n, scratch);
  for (uint32_t i = threadIdx.x; i < sizeof scratch.level / 4; i += kThreads) reinterpret_cast<uint32_t*>(scratch.level[0])[i] = 0;
  __syncthreads();
  if (!scratch.good) return false;

  // In a good LIST no level has more bits of `rest` than the words that its places are among: a one past this window is wrong.
  const uint32_t most = n + (kLevels - 1) * (n / 4), rest_at = scratch.rest_at;
  const uint32_t window = 8 * bytes - rest_at < most ? uint32_t(8 * bytes) - rest_at : most, span = (window + kThreads - 1) / kThreads;
  OwnOnes ones = {scratch, BitString(chunk), least(threadIdx.x * span, window), least((threadIdx.x + 1) * span, window), 0};
  uint32_t count = 0, all;
  for (uint32_t at = ones.begin; at < ones.end; at += 32) count += uint32_t(__popc(ones.string.read(rest_at + at, rest_at + ones.end)));
  const uint32_t past = rest_at + window;
  for (uint64_t i = past / 32 + threadIdx.x; i < bytes / 4; i += kThreads) {
    const uint32_t bits = reinterpret_cast<const uint32_t*>(chunk)[i];
    if (i == past / 32 ? bits >> past % 32 : bits) count = kLevels * kListWords + 1;  // too many
  }
  ones.number = sum_before(count, scratch.told[0], all);
  if (all != scratch.first[kLevels]) return false;

  uint32_t low_sum = 0;
  ones.each([&](uint32_t, uint32_t, uint32_t, uint32_t low) { low_sum += low; });
  const uint32_t low_before = sum_before(low_sum, scratch.told[1], all);
  low_sum = low_before;
  ones.each([&](uint32_t level, uint32_t number, uint32_t at, uint32_t low) {
    if (number == 0) scratch.low_before[level] = low_sum;
    if (number + 1 == scratch.m[level] && level + 1 < kLevels) scratch.rest_before[level + 1] = at + 1;
    low_sum += low;
  });
  if (threadIdx.x == 0) scratch.rest_before[0] = 0;
  if (words != bases) copy_raw(reinterpret_cast<const uint8_t*>(bases), reinterpret_cast<uint8_t*>(words), n * uint32_t(sizeof(Word)));
  __syncthreads();

  // The sums cannot overflow: a window has fewer than 2^16 bits, and r is at most 13.
  bool good = true;
  low_sum = low_before;
  ones.each([&](uint32_t level, uint32_t number, uint32_t at, uint32_t low) {
    low_sum += low;
    const uint32_t zeros = at - scratch.rest_before[level] - number;
    const uint32_t place = (zeros << scratch.r[level]) + low_sum - scratch.low_before[level] + number;
    if (place >= (level ? scratch.m[level - 1] : n)) good = false;
    else if (level == 0) scratch.place[number] = uint16_t(place);
    else put_bits(scratch.level[level - 1], place, 1);
  });
  if (!good) scratch.good = false;
  __syncthreads();
  if (!scratch.good) return false;

  if (warp_id() + 1 < scratch.levels) {
    const uint32_t* const plane = reinterpret_cast<const uint32_t*>(scratch.level[warp_id()]);
    uint16_t* const before = scratch.before[warp_id()];
    uint32_t carried = 0;
    for (uint32_t i = lane_id(); i < kListWords / 32; i += kLanes) {
      const uint32_t own = uint32_t(__popc(plane[i]));
      before[i] = uint16_t(carried + sum_below(own));
      carried += __reduce_add_sync(kEveryLane, own);
    }
  }
  __syncthreads();

  for (uint32_t i = threadIdx.x; i < scratch.m[0]; i += kThreads) {
    uint32_t size = 1, at = i;
    for (; size < scratch.levels; ++size) {
      const uint32_t bits = reinterpret_cast<const uint32_t*>(scratch.level[size - 1])[at / 32];
      if (!(bits >> at % 32 & 1)) break;
      at = scratch.before[size - 1][at / 32] + uint32_t(__popc(bits & low_ones(at % 32)));
    }
    const uint32_t place = scratch.place[i];
    Word word = 0;
    if (size == kLevels) {
      const uint8_t* const from = chunk + scratch.words_at + at * sizeof(Word);
      for (uint32_t byte = 0; byte < sizeof(Word); ++byte) word |= Word(Word(from[byte]) << 8 * byte);
    } else {
      const bool negative = ones.string.peek(scratch.sign_at + i, 1) & 1;
      const Word order = order_of(bases[place]);
      word = word_of(Word(negative ? order - size : order + size));
    }
    words[place] = word;
  }
  return true;
}

}  // namespace
}  // namespace zipccl
