// Payloads as chunks that are spread over threads; shared by the C interfaces of the CPU codecs.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/interface.h"
#include "cpu/level.h"
#include "common/change_list.cuh"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zipccl {
namespace {

constexpr uint64_t kBytesPerThread = 1 << 20;  // seed, measured on Zen 4: with less to do a thread costs more than it saves
constexpr uint64_t kStreamBytes = 8 << 20;      // seed: more words than this leave the cache before the reader comes
constexpr uint64_t kRun = 8;              // chunks that a thread takes in a row
constexpr uint64_t kChunkExtra = 256;     // a chunk is larger than its words by less than this
constexpr uint32_t kItemsize[ZIPCCL_TYPES] = {2, 2, 4, 1, 1, 1};

// Place of a dtype of FORMAT.md table 1.1 in the tables of a level.
ZipcclType type_of(int32_t dtype) {
  switch (dtype) {
    case 2: return ZIPCCL_FP16;
    case 3: return ZIPCCL_FP32;
    case 6: return ZIPCCL_BYTES;
    case 13: return ZIPCCL_E4M3;
    case 14: return ZIPCCL_E5M2;
    default: return ZIPCCL_BF16;
  }
}

uint64_t chunks_of(uint64_t numel, uint32_t block) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks;
  return (numel + per_chunk - 1) / per_chunk;
}
uint64_t index_bytes(uint64_t chunks) { return (4 * chunks + 15) / 16 * 16; }

// Makes words that went past the cache visible before a later store of this thread.
void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Number of threads, at most `threads`, that are worth their start for so many bytes of words.
int32_t useful_threads(int32_t threads, uint64_t bytes) {
  return int32_t(std::max<uint64_t>(1, std::min<uint64_t>(threads < 1 ? 1 : threads, bytes / kBytesPerThread)));
}

// Runs work() on `threads` threads, this one included; on fewer where the system has no more.
template <typename Work>
void on_threads(int32_t threads, Work work) {
  std::vector<std::thread> others;
  try {
    for (int32_t i = 1; i < threads; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
  }
  work();
  for (std::thread& thread : others) thread.join();
}

// Threads call each(first, n) for parts of `part` of `count` things, which are `bytes` bytes all together.
template <typename Each>
void each_part(uint64_t count, uint64_t part, uint64_t bytes, int32_t threads, Each each) {
  std::atomic<uint64_t> ticket{0};
  on_threads(useful_threads(threads, bytes), [&] {
    for (uint64_t first; (first = ticket.fetch_add(part, std::memory_order_relaxed)) < count;) each(first, std::min(part, count - first));
  });
}

// Copies the parts of a chunk of `bytes` bytes to one place; returns their end.
uint8_t* place(const ZipcclPart* parts, uint32_t bytes, uint8_t* to) {
  for (const uint8_t* const end = to + bytes; to < end; to += parts++->padded) {
    memcpy(to, parts->from, parts->bytes);
    memset(to + parts->bytes, 0, parts->padded - parts->bytes);
  }
  return to;
}

// Encodes `count` segments, of which each has `numel` words at `words` to go to `out`, and gets its `bytes`. Chunks are encoded by
// encode_chunk(segment, offset of the chunk in its words in bytes, its numel, workspace, parts, where the chunk will go), which returns its
// bytes, with kListBit for its entry in the index.
template <typename Segment, typename EncodeChunk>
void encode_segments(Segment* segments, uint32_t count, ZipcclType type, uint32_t block, int32_t threads, EncodeChunk encode_chunk) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunk_bytes = per_chunk * kItemsize[type];
  uint64_t total = 0;
  for (uint32_t s = 0; s < count; ++s) total += segments[s].numel * kItemsize[type];
  threads = useful_threads(threads, total);
  // A thread encodes the chunks of a run and then puts them where they go. Runs are encoded in any order, but placed in theirs: the
  // next to be placed is `turn`. Several threads gather a run in an image: taking turns with every chunk, they would be in each other's
  // cache lines and pages all the time.
  const uint64_t run = threads > 1 ? kRun : 1;
  uint64_t all_runs = 0;
  for (uint32_t s = 0; s < count; ++s) {
    const uint64_t chunks = chunks_of(segments[s].numel, block);
    segments[s].bytes = index_bytes(chunks);
    if (chunks) memset(segments[s].out, 0, segments[s].bytes);
    all_runs += (chunks + run - 1) / run;
  }
  std::atomic<uint64_t> ticket{0}, turn{0};
  on_threads(threads, [&] {
    alignas(64) uint8_t workspace[kZipcclWorkspace + kZipcclGathered];
    const std::unique_ptr<uint8_t[]> image(run > 1 ? new uint8_t[run * (chunk_bytes + kChunkExtra)] : nullptr);
    ZipcclPart parts[kZipcclParts];
    uint32_t s = 0;
    uint64_t before = 0;  // runs of the segments before s
    for (uint64_t next; (next = ticket.fetch_add(1, std::memory_order_relaxed)) < all_runs;) {
      for (uint64_t here; next - before >= (here = (chunks_of(segments[s].numel, block) + run - 1) / run); ++s) before += here;
      Segment& segment = segments[s];
      uint8_t* const out = static_cast<uint8_t*>(segment.out);
      const uint64_t first = (next - before) * run, last = std::min(first + run, chunks_of(segment.numel, block));
      uint32_t sizes[kRun];
      uint8_t* to = run > 1 ? image.get() : out + segment.bytes;
      for (uint64_t chunk = first; chunk < last; ++chunk) {
        const uint32_t numel = uint32_t(std::min(segment.numel - chunk * per_chunk, per_chunk));
        const uint32_t size = sizes[chunk - first] = encode_chunk(segment, chunk * chunk_bytes, numel, workspace, parts, to);
        to = place(parts, size & ~kListBit, to);
      }
      for (uint32_t spins = 0; turn.load(std::memory_order_acquire) != next; ++spins)
        if (spins > 1000) std::this_thread::yield();
      uint64_t at = segment.bytes;
      for (uint64_t chunk = first; chunk < last; at += sizes[chunk++ - first] & ~kListBit) {
        const uint32_t offset = uint32_t(at / 16) | (sizes[chunk - first] & kListBit);
        memcpy(out + 4 * chunk, &offset, 4);
      }
      std::swap(at, segment.bytes);
      const uint64_t bytes = segment.bytes - at;
      turn.store(next + 1, std::memory_order_release);
      if (run > 1) memcpy(out + at, image.get(), bytes);
    }
  });
}

// The blocks of a chunk of words in one place, and the words behind it, which are encoded next, a half of a block each.
struct ChunkPlaces {
  const uint8_t *blocks[kChunkBlocks], *next[2 * kChunkBlocks];
  ChunkPlaces(const uint8_t* words, uint64_t chunk_bytes) {
    for (uint32_t b = 0; b < kChunkBlocks; ++b) blocks[b] = words + b * (chunk_bytes / kChunkBlocks);
    for (uint32_t i = 0; i < 2 * kChunkBlocks; ++i) next[i] = words + chunk_bytes + i * (chunk_bytes / (2 * kChunkBlocks));
  }
};

// encode_segments of words in one place, by the function of a level; `rounding`: the argument that it takes behind `block`, if any.
template <typename Function, typename... Rounding>
void encode_words(ZipcclSegment* segments, uint32_t count, ZipcclType type, uint32_t block, int32_t threads, Function* encode_chunk,
                  Rounding... rounding) {
  const uint64_t chunk_bytes = uint64_t(block) * kChunkBlocks * kItemsize[type];
  encode_segments(segments, count, type, block, threads,
                  [&](const ZipcclSegment& segment, uint64_t at, uint32_t numel, void* workspace, ZipcclPart* parts, const uint8_t* soon) {
                    const ChunkPlaces places(static_cast<const uint8_t*>(segment.words) + at, chunk_bytes);
                    return encode_chunk(places.blocks, numel, block, rounding..., workspace, parts, soon, places.next);
                  });
}

// Calls decode_chunk(chunk, its bytes, first element, elements, flag) for every chunk of a payload; `flag_bit` is the flag's bit in the
// entries of the index, or zero. The first chunk's failure in order wins.
template <uint32_t flag_bit, typename DecodeChunk>
int32_t each_chunk(const uint8_t* payload, uint64_t bytes, uint64_t numel, uint32_t block, int32_t threads, uint64_t raw_bytes,
                   DecodeChunk decode_chunk) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunks = chunks_of(numel, block), begin = index_bytes(chunks);
  if (begin > bytes) return INDEX;
  if (!chunks) return bytes ? INDEX : OK;
  std::atomic<uint64_t> ticket{0}, failure{~0ull};  // chunk << 8 | status
  on_threads(useful_threads(threads, raw_bytes), [&] {
    for (uint64_t chunk = 0, last = 0;; ++chunk) {
      if (chunk == last) last = (chunk = ticket.fetch_add(kRun, std::memory_order_relaxed)) + kRun;
      if (chunk >= chunks || failure.load(std::memory_order_relaxed) >> 8 < chunk) break;
      uint32_t offsets[2] = {0, 0};
      memcpy(offsets, payload + 4 * chunk, chunk + 1 < chunks ? 8 : 4);
      const uint64_t start = uint64_t(offsets[0] & ~flag_bit) * 16;
      const uint64_t end = chunk + 1 < chunks ? uint64_t(offsets[1] & ~flag_bit) * 16 : bytes;
      int32_t status = INDEX;
      if (start >= begin && start <= end && end <= bytes && (chunk || start == begin)) {
        const uint64_t first = chunk * per_chunk;
        status = decode_chunk(payload + start, end - start, first, uint32_t(std::min(numel - first, per_chunk)), offsets[0] & flag_bit);
      }
      if (status) {
        uint64_t known = failure.load();
        while (chunk < known >> 8 && !failure.compare_exchange_weak(known, chunk << 8 | uint64_t(status))) {
        }
      }
    }
    finish_streams();
  });
  return failure.load() == ~0ull ? int32_t(OK) : int32_t(failure.load() & 255);
}

}  // namespace
}  // namespace zipccl
