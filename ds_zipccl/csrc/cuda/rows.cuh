// Rows of a segment for CUDA (FORMAT.md 2.6): which rows repeat an earlier one, sums for factors between rows, and predicted rows. A warp
// takes a row.
#pragma once
#include "common/float_values.cuh"
#include "common/scaled_row.cuh"
#include "cuda/hash.cuh"

namespace zipccl {
namespace {

struct FindRows {
  const uint8_t* data;  // row 0, at a multiple of `unit`, as `row_bytes` is
  uint64_t row_bytes;
  uint32_t* sources;    // of each row from `first` on: first its slot, then its source
  uint32_t* table;      // slots: 0, or the first row of those that are equal, plus 1
  uint32_t* repeats;    // a counter
  uint32_t first, count;
  uint32_t mask;        // slots - 1, a power of two less 1
  uint32_t unit;        // bytes that a lane reads at a time: 1, 2, 4 or 16
  uint32_t naming;      // the second pass: slots to sources
};

constexpr uint32_t kSampleBytes = 128;  // of a row, at most
constexpr uint32_t kPatience = 4;       // rows with the samples of a row, and other words, after which the whole row is hashed

ZIPCCL_DEVICE uint64_t mixed(uint64_t x, uint64_t at) { return hash_mix(x + (at + 1) * kHashStep); }
ZIPCCL_DEVICE uint64_t mixed(const uint4& x, uint64_t at) {
  return mixed(uint64_t(x.y) << 32 | x.x, 2 * at) + mixed(uint64_t(x.w) << 32 | x.z, 2 * at + 1);
}
template <typename Unit>
ZIPCCL_DEVICE bool is_same(Unit a, Unit b) { return a == b; }
ZIPCCL_DEVICE bool is_same(const uint4& a, const uint4& b) { return ((a.x ^ b.x) | (a.y ^ b.y) | (a.z ^ b.z) | (a.w ^ b.w)) == 0; }

// The hash of a few units of a row, as far apart as possible.
template <typename Unit>
ZIPCCL_DEVICE uint64_t sample_hash(const Unit* row, uint64_t units) {
  constexpr uint32_t samples = kSampleBytes / sizeof(Unit) < kLanes ? kSampleBytes / sizeof(Unit) : kLanes;
  const uint64_t at = lane_id() * units / samples;
  return sum_of_lanes(lane_id() < samples ? mixed(row[at], at) : 0);
}
template <typename Unit>
ZIPCCL_DEVICE uint64_t row_hash(const Unit* row, uint64_t units) {
  uint64_t sum = 0;
  for (uint64_t at = lane_id(); at < units; at += kLanes) sum += mixed(row[at], at);
  return sum_of_lanes(sum);
}

template <typename Unit>
ZIPCCL_DEVICE bool are_equal(const Unit* a, const Unit* b, uint64_t units) {
  for (uint64_t from = 0; from < units; from += kLanes) {
    const uint64_t at = from + lane_id();
    if (__any_sync(kEveryLane, at < units && !is_same(a[at], b[at]))) return false;
  }
  return true;
}

// The entry of a slot. A free one is given `own`, and the result is zero.
ZIPCCL_DEVICE uint32_t entry_at(uint32_t* slot, uint32_t own) {
  const uint32_t there = lane_id() == 0 ? atomicCAS(slot, 0u, own) : 0;
  return __shfl_sync(kEveryLane, there, 0);
}

// Rows to slots. No slot is ever emptied, or given to a row with other words. So equal rows go the same way and end in one slot, whatever
// the order of the warps. The slot keeps the first of them.
template <typename Unit>
ZIPCCL_DEVICE void place_rows(const FindRows& job) {
  const uint64_t units = job.row_bytes / sizeof(Unit);
  const auto row_of = [&](uint32_t row) { return reinterpret_cast<const Unit*>(job.data + row * job.row_bytes); };
  for (uint32_t i = blockIdx.x * kWarps + warp_id(); i < job.count; i += gridDim.x * kWarps) {
    const uint32_t entry = job.first + i + 1;
    const Unit* const row = row_of(entry - 1);
    const uint64_t samples = sample_hash(row, units);
    uint32_t slot = uint32_t(samples) & job.mask, alike = 0, there;
    while ((there = entry_at(job.table + slot, entry)) != 0) {
      const Unit* const other = row_of(there - 1);
      const bool may_be = sample_hash(other, units) == samples;
      if (may_be && are_equal(other, row, units)) break;
      slot = (may_be && ++alike == kPatience ? uint32_t(row_hash(row, units)) : slot + 1) & job.mask;
    }
    if (lane_id() == 0) {
      if (there > entry) atomicMin(job.table + slot, entry);
      job.sources[i] = slot;
    }
  }
}

ZIPCCL_DEVICE void name_rows(const FindRows& job) {
  for (uint32_t from = blockIdx.x * kThreads; from < job.count; from += gridDim.x * kThreads) {
    const uint32_t i = from + threadIdx.x;
    uint32_t source = job.first + i;
    if (i < job.count) job.sources[i] = source = job.table[job.sources[i]] - 1;
    const uint32_t repeats = __reduce_add_sync(kEveryLane, uint32_t(source != job.first + i));
    if (lane_id() == 0 && repeats) atomicAdd(job.repeats, repeats);
  }
}

ZIPCCL_DEVICE void find_rows(const FindRows& job) {
  if (job.naming) return name_rows(job);
  switch (job.unit) {
    case 1: return place_rows<uint8_t>(job);
    case 2: return place_rows<uint16_t>(job);
    case 4: return place_rows<uint32_t>(job);
    default: return place_rows<uint4>(job);
  }
}

// Pairs of rows of `words`: each with its source.
struct RowPairs {
  const void* words;  // row 0, at any address of a word
  uint64_t width;
  const uint32_t* rows;     // the numbers of the rows; unused by predictions
  const uint32_t* sources;  // and of their sources
  const uint32_t* factors;  // of predictions
  void* out;                // predictions: `count` rows; sums: two doubles for each pair
  uint32_t count;
};

ZIPCCL_DEVICE double double_of_lane(double x, uint32_t lane) {
  const uint64_t bits = uint64_t(__double_as_longlong(x));
  const uint32_t low = __shfl_sync(kEveryLane, uint32_t(bits), lane), high = __shfl_sync(kEveryLane, uint32_t(bits >> 32), lane);
  return __longlong_as_double(static_cast<long long>(uint64_t(high) << 32 | low));
}

// The sums of a b and of a a over a source a and a row b, as 32 sums of every 32nd element, added up in the order of the lanes.
template <typename F>
ZIPCCL_DEVICE void row_sums(const RowPairs& job) {
  using Word = typename F::Word;
  for (uint32_t i = blockIdx.x * kWarps + warp_id(); i < job.count; i += gridDim.x * kWarps) {
    const Word* const from = static_cast<const Word*>(job.words) + job.sources[i] * job.width;
    const Word* const row = static_cast<const Word*>(job.words) + job.rows[i] * job.width;
    double own[2] = {0, 0};
    for (uint64_t at = lane_id(); at < job.width; at += kLanes) {
      const double a = double(Values<F>::from(from[at])), b = double(Values<F>::from(row[at]));
      own[0] = __dadd_rn(own[0], __dmul_rn(a, b));
      own[1] = __dadd_rn(own[1], __dmul_rn(a, a));
    }
    for (uint32_t which = 0; which < 2; ++which) {
      double sum = double_of_lane(own[which], 0);
      for (uint32_t lane = 1; lane < kLanes; ++lane) sum = __dadd_rn(sum, double_of_lane(own[which], lane));
      if (lane_id() == 0) static_cast<double*>(job.out)[2 * i + which] = sum;
    }
  }
}

template <typename F>
ZIPCCL_DEVICE void predict_rows(const RowPairs& job) {
  using Word = typename F::Word;
  for (uint32_t i = blockIdx.x * kWarps + warp_id(); i < job.count; i += gridDim.x * kWarps) {
    const Word* const from = static_cast<const Word*>(job.words) + job.sources[i] * job.width;
    Word* const to = static_cast<Word*>(job.out) + i * job.width;
    const Factor factor(job.factors[i]);
    for (uint64_t at = lane_id(); at < job.width; at += kLanes) to[at] = predict<F>(from[at], factor);
  }
}

}  // namespace
}  // namespace zipccl
