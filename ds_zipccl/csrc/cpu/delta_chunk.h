// Chunks of a delta payload on the CPU (FORMAT.md 2.3 and section 3).
#pragma once
#include "cpu/delta.h"

namespace zipccl {
namespace {

// Codes a block as in a payload without a base, with the code CASCADE; `body` has room for its first part, `tail` for its worst case.
template <typename F, typename Lanes>
void encode_alone(Block& block, uint8_t* body, uint8_t* tail) {
  survey_block<F, Cascade, Lanes>(block, body);
  encode_body<F, Cascade, Lanes>(block);
  const auto tier = [&](auto index) __attribute__((always_inline)) {
    TierPlanes& planes = block.tiers[index.value - 1];
    if (block.form.mode == CASCADE) block.left = encode_tier<Cascade, index.value, Lanes>(block.list, block.left, block.form.top, planes);
    if (block.form.mode == WIDE) block.left = encode_tier<Wide, index.value, Lanes>(block.list, block.left, block.form.top, planes);
  };
  tier(Index<1>());
  tier(Index<2>());
  tier(Index<3>());
  write_tail<F, Cascade, Lanes>(block, tail);
}

// least_alone_bytes of n words.
template <typename F, typename Lanes>
uint32_t least_alone(const uint8_t* words, uint32_t n) {
  uint64_t zeros[kGroups];
  return least_alone_bytes<F>(n, zero_map<F, Lanes>(words, n, zeros), F::has_trim ? trailing_zeros<F>(words, n) : 0);
}

// One block against its base.
template <typename F, typename Lanes>
void encode_against(Block& block, const uint8_t* base, Change<F>& change, uint8_t* body, uint8_t* tail) {
  using Word = typename F::Word;
  const uint8_t* const words = block.words;
  const uint32_t n = block.n;
  block.body = body;
  if (!memcmp(words, base, n * sizeof(Word))) {
    block.form = {CHANGE, 0, 0, 0, 0};
    return;
  }
  if (!memcmp(words, words + sizeof(Word), (n - 1) * sizeof(Word))) return encode_alone<F, Lanes>(block, body, tail);
  change.n = n;
  survey_change<F, Lanes>(words, base, change);
  const Scaled& scaled = scale_change<F, Lanes>(change);
  if (scaled.tail > plane_bytes(n) && scaled.tail >= least_alone<F, Lanes>(words, n)) {
    encode_alone<F, Lanes>(block, body, tail);
    if (block.form.body + block.form.tail <= scaled.tail) return;
  }
  block.form = {CHANGE, scaled.top, 0, 0, scaled.tail};
  plan_change<F, Lanes>(scaled, change);
  write_change<F, Lanes>(words, change, scaled.flags, tail);
}

// encode_chunk against the words at `base`.
template <typename F, typename Lanes>
uint32_t encode_delta_chunk(const uint8_t* words, const uint8_t* base, uint32_t numel, uint32_t block, void* workspace, ZipcclPart* parts) {
  using Word = typename F::Word;
  Workspace& work = *static_cast<Workspace*>(workspace);
  Change<F> change;
  const uint32_t blocks = (numel + block - 1) / block, slot = pad16(first_part_bytes(block, 1 + F::M, Wide::tier[0].bits));
  memset(work.table, 0, sizeof work.table);
  uint32_t bytes = table_bytes<F>(blocks), tail = 0;
  *parts++ = {work.table, bytes, bytes};
  for (uint32_t b = 0; b < blocks; ++b) {
    Block& here = work.blocks[b];
    here.words = words + b * block * sizeof(Word);
    here.n = numel - b * block < block ? numel - b * block : block;
    for (uint32_t at = 0; at < block * sizeof(Word); at += 64) {  // the next block, while this one is coded
      prefetch(here.words + block * sizeof(Word) + at);
      prefetch(base + (b + 1) * block * sizeof(Word) + at);
    }
    encode_against<F, Lanes>(here, base + b * block * sizeof(Word), change, work.bodies + b * slot, work.tails + tail);
    *parts++ = enter<F>(work, b, blocks);
    bytes += here.form.body;
    tail += here.form.tail;
  }
  *parts = {work.tails, tail, pad16(tail)};
  return bytes + pad16(tail);
}

// Decoder of CHANGE in a chunk whose base begins at `words`.
struct AtBase {
  static constexpr uint32_t last_mode = CHANGE;
  const uint8_t* words;
  template <typename F, typename Lanes>
  Status decode(const Entry& entry, uint32_t at, uint8_t* to) const {
    return decode_change<F, Lanes>(entry.tail, entry.tail_bytes, words + at * sizeof(typename F::Word), entry.n, entry.top, to);
  }
};

template <typename F, typename Lanes>
int32_t decode_delta_chunk(const uint8_t* chunk, uint64_t bytes, const uint8_t* base, uint32_t numel, uint32_t block, uint8_t* out) {
  const uint32_t block_bytes = block * uint32_t(sizeof(typename F::Word));
  const auto where = [&](uint32_t b) { return out + b * block_bytes; };
  return each_block<F, Lanes>(chunk, bytes, numel, block, false, where, [](const uint8_t*, uint32_t, uint32_t) {}, AtBase{base});
}

}  // namespace
}  // namespace zipccl
