// Encodes LIST chunks, and chooses the form of a chunk (FORMAT.md 2.5 and section 3).
#pragma once
#include "cuda/delta/gap_list.cuh"

namespace zipccl {
namespace {

// A thread's bits of a plane that has a bit for each word of the chunk; a thread has `span` words: 8, 16, 32 or 64.
ZIPCCL_DEVICE uint64_t own_bits(const uint8_t* plane, uint32_t span) {
  if (span == 64) return reinterpret_cast<const uint64_t*>(plane)[threadIdx.x];
  const uint32_t at = threadIdx.x * span;
  return reinterpret_cast<const uint32_t*>(plane)[at / 32] >> at % 32 & low_ones(span);
}
ZIPCCL_DEVICE void put_own_bits(uint8_t* plane, uint32_t span, uint64_t bits) {
  if (span == 64) reinterpret_cast<uint64_t*>(plane)[threadIdx.x] = bits;
  else
    for (uint32_t at = threadIdx.x * span / 8, end = at + span / 8; at < end; ++at, bits >>= 8) plane[at] = uint8_t(bits);
}

// The most bytes of a LIST: level 1 has no more bits than G; each level after it has no more than a plane over the level before.
template <typename Word>
constexpr uint32_t kMaxListBytes = pad16(list_set_at(kLevels) + kListWords * uint32_t(sizeof(Word)) +
                                         (kChunkBlocks * (32 + kMaxBlock) + kLevels * kListWords + 7) / 8);

// The scratch of an encoder.
template <typename F>
struct Lists {
  alignas(16) uint8_t level[kLevels][kChunkWords / 8];  // bit planes: |D| is larger than the number of the plane
  alignas(16) uint8_t negative[kChunkWords / 8];
  alignas(16) uint8_t string[kMaxListBytes<typename F::Word>];  // the LIST
};

// How a chunk is coded. EITHER: as LIST or TABLE, whose bytes decide.
enum ChunkForm : uint32_t { SAME, TABLE, LIST, EITHER };

// The facts about a chunk's LIST that its threads share.
struct ListPlan {
  Told told[2];
  uint32_t sums[kLevels][(kMaxRice + 1) / 2];  // of gap >> r for two r
  uint32_t table_bits;
  uint32_t m[kLevels], r[kLevels], low_at[kLevels], rest_at[kLevels];
  uint32_t words_at, sign_at;
  uint32_t bytes;
  ChunkForm form;
};

// The fewest bits of groups and level 1 of a block of n words, of which a lane has 32 in `changed`; zero where no word changed.
ZIPCCL_DEVICE uint32_t fewest_group_bits(uint32_t changed, uint32_t n) {
  const uint32_t valid = Part{n}.marks(), twos = changed | changed >> 1, fours = (twos | twos >> 2) & 0x11111111u;
  const uint32_t eights = (fours | fours >> 4) & 0x01010101u, sixteens = (eights | eights >> 8) & 0x00010001u;
  const uint32_t live4 = uint32_t(__popc(fours * 0xf & valid)), live8 = uint32_t(__popc(eights * 0xff & valid));
  const uint32_t both = __reduce_add_sync(kEveryLane, live4 | live8 << 16);
  const uint32_t live[kGroupSizes] = {0, both & 0xffff, both >> 16, __reduce_add_sync(kEveryLane, uint32_t(__popc(sixteens * 0xffff & valid)))};
  return both ? best_groups(n, live).bits : 0;
}

// Calls each(word, gap) for a thread's words of a level, which are marked in `level` among the thread's words of the level before, marked in
// `among`. `before` of these belong to earlier threads; `end` is the place after the last word of the level that an earlier thread has.
template <typename Each>
ZIPCCL_DEVICE void each_gap(uint64_t level, uint64_t among, uint32_t before, uint32_t end, Each each) {
#pragma unroll 1
  for (; level; level &= level - 1) {
    const uint64_t below = (level & -level) - 1;
    const uint32_t place = before + uint32_t(__popcll(among & below));
    each(uint32_t(__popcll(below)), place - end);
    end = place + 1;
  }
}

// A thread's words of all levels.
template <typename F>
struct OwnWords {
  const Lists<F>& lists;
  uint32_t span;
  EachLevel before, ends;  // words of earlier threads, and the places after the last of them

  ZIPCCL_DEVICE uint64_t level(uint32_t level) const { return own_bits(lists.level[level], span); }
  ZIPCCL_DEVICE uint64_t among(uint32_t level) const { return level ? own_bits(lists.level[level - 1], span) : ~0ull; }
  ZIPCCL_DEVICE uint32_t before_among(uint32_t level) const { return level ? before.of(level - 1) : threadIdx.x * span; }
  template <typename Each>
  ZIPCCL_DEVICE void each(uint32_t number, Each next) const {
    each_gap(level(number), among(number), before_among(number), ends.of(number), next);
  }
};

// A warp lays out the LIST of n words with the counts m of all levels, and chooses the form of the chunk (FORMAT.md section 3).
template <typename F>
ZIPCCL_DEVICE void plan_list(uint32_t n, const EachLevel& counts, bool lost, ListPlan& plan) {
  const uint32_t lane = lane_id(), m = lane < kLevels ? counts.of(lane) : 0;
  uint32_t r = 0, sum = 0;
  if (m) {
    const RiceChoice best = best_rice(m, 0, [&](uint32_t r) { return plan.sums[lane][r / 2] >> 16 * (r % 2) & 0xffff; });
    r = best.r, sum = best.sum;
  }
  const uint32_t levels = uint32_t(__popc(__ballot_sync(kEveryLane, m != 0)));
  const uint32_t bits = rice_bits(m, r, sum), low = m * r, all_bits = __reduce_add_sync(kEveryLane, bits);
  const uint32_t all_low = __reduce_add_sync(kEveryLane, low), low_before = sum_below(low), rest_before = sum_below(bits - low);
  const uint32_t first = counts.of(0), escapes = counts.of(kLevels - 1), words_at = list_set_at(levels);
  const uint32_t low_at = 8 * (words_at + escapes * uint32_t(sizeof(typename F::Word))), sign_at = low_at + all_low;
  if (lane < kLevels)
    plan.m[lane] = m, plan.r[lane] = r, plan.low_at[lane] = low_at + low_before, plan.rest_at[lane] = sign_at + first + rest_before;
  if (lane) return;
  plan.words_at = words_at, plan.sign_at = sign_at;
  plan.bytes = list_bytes<F>(levels, first, all_bits, escapes);
  plan.form = bits > plan.table_bits ? TABLE : lost || list_certain(n, first, escapes) ? LIST : EITHER;
}

// Writes the LIST that is planned to the scratch.
template <typename F>
ZIPCCL_DEVICE void write_list(const typename F::Word* words, const OwnWords<F>& own, uint32_t levels, ListPlan& plan, Lists<F>& lists) {
  for (uint32_t i = threadIdx.x; i < plan.bytes / 4; i += kThreads) reinterpret_cast<uint32_t*>(lists.string)[i] = 0;
  EachLevel rest = {}, all;
  for (uint32_t level = 0; level < levels; ++level) {
    const uint32_t r = plan.r[level];
    uint32_t bits = 0;
    own.each(level, [&](uint32_t, uint32_t gap) { bits += (gap >> r) + 1; });
    rest.add(level, bits);
  }
  rest = sum_before(rest, plan.told[1], all);  // and the string is zero
  if (threadIdx.x < levels) put_bits(lists.string, 8 * list_set_at(threadIdx.x), plan.m[threadIdx.x] | plan.r[threadIdx.x] << 16);
  if (threadIdx.x == 0) put_bits(lists.string, 0, levels);
  const uint64_t negative = own_bits(lists.negative, own.span);
  for (uint32_t level = 0; level < levels; ++level) {
    const uint32_t r = plan.r[level];
    uint32_t number = own.before.of(level), at = plan.rest_at[level] + rest.of(level);
    own.each(level, [&](uint32_t word, uint32_t gap) {
      put_bits(lists.string, plan.low_at[level] + number * r, gap & low_ones(r));
      at += gap >> r;
      put_bits(lists.string, at++, 1);
      if (level == 0) put_bits(lists.string, plan.sign_at + number, uint32_t(negative >> word & 1));
      if (level == kLevels - 1) {
        const uint32_t to = plan.words_at + number * uint32_t(sizeof(typename F::Word));
        put_bits(lists.string, 8 * to, words[threadIdx.x * own.span + word]);
      }
      ++number;
    });
  }
}

// Chooses the form of a chunk of n words, at least one, in blocks of `block`; for LIST writes it to the scratch, if it has at most `room`
// bytes. `lost`: TABLE is no smaller. All threads of the block call it; they may use the scratch when it has returned, but must have a
// barrier before they read the string.
template <typename F>
ZIPCCL_DEVICE ChunkForm list_changes(const typename F::Word* words, const typename F::Word* bases, uint32_t n, uint32_t block, bool lost,
                                     uint64_t room, ListPlan& plan, Lists<F>& lists) {
  using Word = typename F::Word;
  const uint32_t warp = warp_id(), lane = lane_id();
  uint32_t differing = 0;
#pragma unroll 2
  for (uint32_t octet = threadIdx.x; octet < kChunkBlocks * block / 8; octet += kThreads) {
    const uint32_t length = 8 * octet < n ? least(n - 8 * octet, 8) : 0;
    Octet<F> word, base;
    word.load(words + 8 * octet, length, 0);
    base.load(bases + 8 * octet, length, 0);
    const uint32_t bits = word.differing(base);
    lists.level[0][octet] = uint8_t(bits);
    differing += uint32_t(__popc(bits));
  }
  for (uint32_t i = threadIdx.x; i < sizeof plan.sums / 4; i += kThreads) plan.sums[i / ((kMaxRice + 1) / 2)][i % ((kMaxRice + 1) / 2)] = 0;
  if (threadIdx.x == 0) plan.table_bits = 0;
  uint32_t m;
  sum_before(differing, plan.told[0], m);
  if (m == 0) return SAME;
  if (!list_allowed(n, m)) return TABLE;

  for (uint32_t b = warp; b * block < n; b += kWarps) {
    const uint32_t changed = 32 * lane < block ? reinterpret_cast<const uint32_t*>(lists.level[0])[b * block / 32 + lane] : 0;
    const uint32_t groups = fewest_group_bits(changed, least(n - b * block, block));
    if (lane == 0) atomicAdd(&plan.table_bits, least_table_bits(groups));
  }

  OwnWords<F> own = {lists, block / (kThreads / kChunkBlocks), {}, {}};
  EachLevel counts = {}, all;
  {
    const uint64_t changed = own_bits(lists.level[0], own.span);
    uint64_t level[kLevels - 1] = {}, negative = 0;
    for (uint64_t left = changed; left; left &= left - 1) {
      const uint64_t mark = left & -left;
      const uint32_t at = threadIdx.x * own.span + uint32_t(__popcll(mark - 1));
      const Change change = change_of<F>(words[at], bases[at]);
#pragma unroll
      for (uint32_t i = 1; i < kLevels; ++i)
        if (change.size > i) level[i - 1] |= mark;
      if (change.negative) negative |= mark;
    }
    counts.add(0, uint32_t(__popcll(changed)));
#pragma unroll
    for (uint32_t i = 1; i < kLevels; ++i) {
      put_own_bits(lists.level[i], own.span, level[i - 1]);
      counts.add(i, uint32_t(__popcll(level[i - 1])));
    }
    put_own_bits(lists.negative, own.span, negative);
  }
  own.before = sum_before(counts, plan.told[1], all);
  uint32_t levels = 1;
  while (levels < kLevels && all.of(levels)) ++levels;

  EachLevel ends = {};
  for (uint32_t level = 0; level < levels; ++level) {
    const uint64_t here = own.level(level);
    if (here) ends.add(level, own.before_among(level) + uint32_t(__popcll(own.among(level) & ~0ull >> __clzll((long long)(here)))));
  }
  own.ends = most_before(ends, plan.told[0]);
#pragma unroll 1
  for (uint32_t level = 0; level < levels; ++level) {
    constexpr uint32_t pairs = (kMaxRice + 1) / 2;
    uint32_t sums[pairs] = {}, sum = 0;
    own.each(level, [&](uint32_t, uint32_t gap) {
#pragma unroll
      for (uint32_t i = 0; i < pairs; ++i) sums[i] += gap >> 2 * i | gap >> (2 * i + 1) << 16;
    });
#pragma unroll
    for (uint32_t i = 0; i < pairs; ++i) {
      const uint32_t of_warp = __reduce_add_sync(kEveryLane, sums[i]);
      if (lane == i) sum = of_warp;
    }
    if (lane < pairs && sum) atomicAdd(&plan.sums[level][lane], sum);
  }
  __syncthreads();
  if (warp == 0) plan_list<F>(n, all, lost, plan);
  __syncthreads();
  if (plan.form == LIST && plan.bytes <= room) write_list<F>(words, own, levels, plan, lists);
  return plan.form;
}

}  // namespace
}  // namespace zipccl
