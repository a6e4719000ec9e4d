// Hashes of regions for CUDA (FORMAT.md section 5). The warps of a region take blocks of 1 KiB in turn; the last warp to end combines the
// sums.
#pragma once
#include "cuda/frame.cuh"
#include "common/region_hash.cuh"

namespace zipccl {
namespace {

struct HashJob {
  const uint8_t* data;  // at any address
  uint64_t bytes;
  uint32_t first_item, items;  // blocks of threads that work on the region
};

struct HashJobs {
  HashJob job[kMaxJobs];
  uint64_t* work;    // three zeros for each job: two sums and a ticket
  uint64_t* result;  // two words for each job: both halves of the hash
  uint64_t key[2];
  uint32_t count;
};

ZIPCCL_DEVICE uint64_t sum_of_lanes(uint64_t x) {
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const uint32_t low = __shfl_sync(kEveryLane, uint32_t(x), lane_id() ^ distance);
    const uint32_t high = __shfl_sync(kEveryLane, uint32_t(x >> 32), lane_id() ^ distance);
    x += uint64_t(high) << 32 | low;
  }
  return x;
}

// The u64 at `at`, with zeros past the end.
ZIPCCL_DEVICE uint64_t hash_word(const HashJob& job, uint64_t at, bool aligned) {
  if (aligned && at + 8 <= job.bytes) return *reinterpret_cast<const uint64_t*>(job.data + at);
  uint64_t word = 0;
  for (uint32_t i = 0; i < 8 && at + i < job.bytes; ++i) word |= uint64_t(job.data[at + i]) << 8 * i;
  return word;
}

// One work item: a part of the blocks of a region.
ZIPCCL_DEVICE void hash_regions(const HashJobs& jobs) {
  const uint32_t number = job_of(jobs, blockIdx.x);
  const HashJob& job = jobs.job[number];
  constexpr uint32_t each = kHashWords / kLanes;
  uint64_t keys[2][each], sums[2] = {0, 0};
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) keys[half][i] = hash_key(kHashWords * half + i * kLanes + lane_id(), jobs.key[half]);
  const uint64_t blocks = (job.bytes + 8 * kHashWords - 1) / (8 * kHashWords);
  const bool aligned = reinterpret_cast<uintptr_t>(job.data) % 8 == 0;
  for (uint64_t block = uint64_t(blockIdx.x - job.first_item) * kWarps + warp_id(); block < blocks; block += uint64_t(job.items) * kWarps) {
    uint64_t products[2] = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < each; ++i) {
      const uint64_t x = hash_word(job, 8 * (block * kHashWords + i * kLanes + lane_id()), aligned);
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t low = uint32_t(x) + uint32_t(keys[half][i]), high = uint32_t(x >> 32) + uint32_t(keys[half][i] >> 32);
        products[half] += uint64_t(low) * high;
      }
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) sums[half] += hash_mix(sum_of_lanes(products[half]) + (block + 1) * kHashStep);
  }
  if (lane_id() == 0) {
    uint64_t* const work = jobs.work + 3 * number;
    for (uint32_t half = 0; half < 2; ++half)
      atomicAdd(reinterpret_cast<unsigned long long*>(work + half), static_cast<unsigned long long>(sums[half]));
    __threadfence();
    if (atomicAdd(reinterpret_cast<unsigned long long*>(work + 2), 1ull) == uint64_t(job.items) * kWarps - 1) {
      __threadfence();
      for (uint32_t half = 0; half < 2; ++half) {
        const uint64_t sum = *static_cast<volatile uint64_t*>(work + half);
        jobs.result[2 * number + half] = hash_mix(job.bytes + hash_key(kHashWords * half, jobs.key[half]) + sum);
      }
    }
  }
}

}  // namespace
}  // namespace zipccl
