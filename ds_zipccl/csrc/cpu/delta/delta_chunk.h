// Chunks of a delta payload on the CPU (FORMAT.md 2.3 and section 3).
#pragma once
#include "cpu/delta/change_decode.h"
#include "cpu/delta/change_encode.h"
#include "cpu/delta/delta_list.h"

namespace zipccl {
namespace {

// Codes a block, whose words are not all equal if they are bytes, as in a payload without a base, with the code CASCADE; bytes as RAW.
// `body` has room for its first part, `tail` for its worst case.
template <typename F, typename Lanes>
void encode_alone(Block& block, uint8_t* body, uint8_t* tail) {
  if constexpr (!F::E) {
    block.form = {RAW, 0, 0, body_bytes<F>(RAW, block.n, 0), 0};
    block.body = block.words;
  } else {
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
}

// least_alone_bytes of n words.
template <typename F, typename Lanes>
uint32_t least_alone(const uint8_t* words, uint32_t n) {
  uint64_t zeros[kGroups];
  return least_alone_bytes<F>(n, zero_map<F, Lanes>(words, n, zeros), F::has_trim ? trailing_zeros<F>(words, n) : 0);
}

// One block against its base, from which the words of `changed` differ.
template <typename F, typename Lanes>
void encode_against(Block& block, const uint8_t* base, const uint64_t* changed, Ahead& ahead, Change<F>& change, uint8_t* body,
                    uint8_t* tail) {
  using Word = typename F::Word;
  const uint8_t* const words = block.words;
  const uint32_t n = block.n;
  block.body = body;
  uint64_t some = 0;
  for (uint32_t at = 0; at < n; at += 64) some |= changed[at / 64];
  if (!some) {
    block.form = {CHANGE, 0, 0, 0, 0};
    return;
  }
  if (!memcmp(words, words + sizeof(Word), (n - 1) * sizeof(Word))) {
    block.form = {FILL, 0, 0, 0, load_word<Word>(words) ? uint32_t(sizeof(Word)) : 0};
    memcpy(tail, words, block.form.tail);
    return;
  }
  change.n = n;
  survey_change<F, Lanes>(words, base, changed, ahead, change);
  const Scaled& scaled = scale_change<F, Lanes>(changed, ahead, change);
  if ((!F::E || scaled.tail > plane_bytes(n)) && scaled.tail >= least_alone<F, Lanes>(words, n)) {
    encode_alone<F, Lanes>(block, body, tail);
    if (block.form.body + block.form.tail <= scaled.tail) return;
  }
  block.form = {CHANGE, scaled.top, 0, 0, scaled.tail};
  ChangePlanes<F, Lanes>::fill(scaled, change);
  write_change<F, Lanes>(words, change, scaled.flags, tail);
}

// A TABLE chunk; as encode_delta_chunk.
template <typename F, typename Lanes>
uint32_t encode_table(const uint8_t* words, const uint8_t* base, uint32_t numel, uint32_t block, const ChangeMap& map, Ahead& ahead,
                      Workspace& work, ZipcclPart* parts) {
  using Word = typename F::Word;
  Change<F> change;
  const uint32_t blocks = (numel + block - 1) / block, slot = pad16(first_part_bytes(block, 1 + F::M, Wide::tier[0].bits));
  memset(work.table, 0, sizeof work.table);
  uint32_t bytes = table_bytes<F>(blocks), tail = 0;
  *parts++ = {work.table, bytes, bytes};
  for (uint32_t b = 0; b < blocks; ++b) {
    Block& here = work.blocks[b];
    here.words = words + b * block * sizeof(Word);
    here.n = numel - b * block < block ? numel - b * block : block;
    encode_against<F, Lanes>(here, base + b * block * sizeof(Word), map.words + b * block / 64, ahead, change, work.bodies + b * slot,
                             work.tails + tail);
    *parts++ = enter<F>(work, b, blocks);
    bytes += here.form.body;
    tail += here.form.tail;
  }
  *parts = {work.tails, tail, pad16(tail)};
  return bytes + pad16(tail);
}

// G of section 3: the bits that the blocks of a chunk take at least, of its groups and levels 1.
uint32_t least_table(const ChangeMap& map, uint32_t n, uint32_t block) {
  uint32_t bits = 0;
  for (uint32_t start = 0; start < n; start += block) {
    const uint32_t here = n - start < block ? n - start : block;
    uint64_t any = 0;
    for (uint32_t at = start; at < start + here; at += 64) any |= map.words[at / 64];
    bits += least_table_bits(any ? choose_groups(map.words + start / 64, here).bits : 0);
  }
  return bits;
}

// encode_chunk against the words at `base`. Returns the chunk's bytes, with kListBit for a LIST.
template <typename F, typename Lanes>
uint32_t encode_delta_chunk(const uint8_t* words, const uint8_t* base, uint32_t numel, uint32_t block, void* workspace, ZipcclPart* parts) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  ChangeMap map;
  map_changes<F, Lanes>(words, base, numel, map);
  if (!map.count) return 0;
  const uint32_t size = numel * uint32_t(sizeof(typename F::Word));
  Ahead ahead = {words + size, base + size, size};
  if (!list_allowed(numel, map.count)) return encode_table<F, Lanes>(words, base, numel, block, map, ahead, work, parts);
  List<F> list;
  list_level1<F, Lanes>(map, numel, ahead, list);
  if (list.bits > least_table(map, numel, block)) return encode_table<F, Lanes>(words, base, numel, block, map, ahead, work, parts);
  list_levels<F, Lanes>(words, base, map.count, ahead, list);
  const uint32_t bytes = list_bytes<F>(list.levels, map.count, list.bits, list.escapes);
  if (!list_certain(numel, map.count, list.escapes)) {
    const uint32_t table = encode_table<F, Lanes>(words, base, numel, block, map, ahead, work, parts);
    if (table < bytes) return table;
  }
  *parts = {work.tails, write_list<F, Lanes>(list, work.tails), bytes};
  return bytes | kListBit;
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
int32_t decode_delta_chunk(const uint8_t* chunk, uint64_t bytes, bool list, const uint8_t* base, uint32_t numel, uint32_t block,
                           uint8_t* out) {
  const uint32_t block_bytes = block * uint32_t(sizeof(typename F::Word));
  if (list) return decode_list<F, Lanes>(chunk, bytes, base, numel, out);
  if (!bytes) {
    if (out != base) memcpy(out, base, numel * sizeof(typename F::Word));
    return OK;
  }
  const auto where = [&](uint32_t b) { return out + b * block_bytes; };
  return each_block<F, Lanes>(chunk, bytes, numel, block, false, where, [](const uint8_t*, uint32_t, uint32_t) {}, AtBase{base});
}

}  // namespace
}  // namespace zipccl
