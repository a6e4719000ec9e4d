// Exponent payload encoder for the CPU, a block at a time (FORMAT.md sections 2 and 3). `Lanes` does the 64-element steps.
#pragma once
#include "bits.h"
#include "exponent_block.cuh"

namespace zipccl {
namespace {

struct Form {  // what the table says of a block
  uint32_t mode, top, trim, body, tail;
};

// Coded elements of m words (FORMAT.md 2.1): the first part to `first`, the second to `second`. Returns the second part's bytes.
// `second` needs room for 6 * m / 8 + m + 16 bytes.
template <typename F, typename Lanes>
uint32_t encode_elements(const typename F::Word* words, uint32_t m, uint32_t top, uint32_t trim, uint8_t* first, uint8_t* second) {
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  const uint32_t r = 1 + F::M - trim, planes = r % 8, plane = plane_bytes(m);
  uint8_t* bit_planes = first + r / 8 * m;
  uint8_t* tier1 = bit_planes + planes * plane;
  uint8_t streams[2 * (kTiers - 1)][kMaxBlock / 8 + 16], raw[kMaxBlock];
  BitWriter tiers[2 * (kTiers - 1)] = {BitWriter(streams[0]), BitWriter(streams[1]), BitWriter(streams[2]),
                                       BitWriter(streams[3]), BitWriter(streams[4]), BitWriter(streams[5])};
  uint32_t raws = 0;

  // Inlined twice: with n = 64 every copy has a fixed size.
  const auto step = [&](uint32_t at, uint32_t n) __attribute__((always_inline)) {
    typename F::Word group[64];
    if (n < 64) memset(group, 0, sizeof group);
    memcpy(group, words + at, n * sizeof(group[0]));
    uint8_t exponent[64], part[64];
    uint64_t codes[2 * kTiers];
    for (uint32_t i = 0; i < 64; ++i) exponent[i] = uint8_t(F::exponent(group[i]));
    for (uint32_t byte = 0; byte < r / 8; ++byte) {
      for (uint32_t i = 0; i < 64; ++i) part[i] = uint8_t(typename F::Word(F::sign_mantissa(group[i]) >> (trim + 8 * byte)));
      memcpy(first + byte * m + at, part, n);
    }
    if (planes) {
      for (uint32_t i = 0; i < 64; ++i) part[i] = uint8_t(typename F::Word(F::sign_mantissa(group[i]) >> (trim + r / 8 * 8)));
      for (uint32_t p = 0; p < planes; ++p) store_plane(bit_planes + p * plane, at, n, Lanes::plane_of(part, p) & ones(n));
    }
    Lanes::tier_codes(exponent, top, codes);
    store_plane(tier1, at, n, codes[0] & ones(n));
    store_plane(tier1 + plane, at, n, codes[1] & ones(n));
    uint64_t left = codes[0] & codes[1] & ones(n);  // elements that no earlier tier named
    for (uint32_t tier = 1; tier < kTiers && left; ++tier) {
      const uint64_t low = codes[2 * tier], high = codes[2 * tier + 1];
      const uint32_t count = popcount(left);
      tiers[2 * tier - 2].put(compress_bits(low, left), count);
      tiers[2 * tier - 1].put(compress_bits(high, left), count);
      left &= low & high;
    }
    for (; left; left &= left - 1) raw[raws++] = exponent[__builtin_ctzll(left)];
  };
  uint32_t at = 0;
  for (; at + 64 <= m; at += 64) step(at, 64);
  if (at < m) step(at, m - at);

  BitWriter out(second);
  for (const BitWriter& tier : tiers)
    for (uint32_t at = 0; at < tier.bits; at += 64) {
      const uint32_t n = tier.bits - at < 64 ? tier.bits - at : 64;
      out.put(load_plane(tier.bytes, at, n), n);
    }
  const uint32_t bytes = (out.bits + 7) / 8;
  memcpy(second + bytes, raw, raws);
  return bytes + raws;
}

// Zero map, signs and the other words compacted (FORMAT.md 2.2). Returns the tail's bytes.
template <typename F, typename Lanes>
uint32_t encode_sparse(const typename F::Word* words, uint32_t n, uint32_t top, uint32_t trim, uint8_t* tail) {
  typename F::Word others[kMaxBlock];
  uint8_t sign_bits[kMaxBlock / 8 + 16];
  BitWriter signs(sign_bits);
  uint32_t m = 0;
  bool negative = false;
  memset(tail, 0, 1 + plane_bytes(n));
  for (uint32_t i = 0; i < n; ++i) {
    if (F::is_zero(words[i])) {
      tail[1 + i / 8] |= uint8_t(1 << i % 8);
      signs.put(words[i] != 0, 1);
      negative |= words[i] != 0;
    } else {
      others[m++] = words[i];
    }
  }
  uint32_t at = 1 + plane_bytes(n);
  if (negative) {
    tail[0] = 1;
    memcpy(tail + at, sign_bits, plane_bytes(signs.bits));
    at += plane_bytes(signs.bits);
  }
  const uint32_t first = first_part_bytes(m, 1 + F::M - trim);
  return at + first + encode_elements<F, Lanes>(others, m, top, trim, tail + at, tail + at + first);
}

// Encodes a block: body at `body`, tail at `tail` (room for the worst case of both). FORMAT.md section 3.
template <typename F, typename Lanes>
Form encode_block(const typename F::Word* words, uint32_t n, uint8_t* body, uint8_t* tail) {
  using Word = typename F::Word;
  uint32_t differs = 0, any = 0, zeros = 0, largest = 0;
  uint32_t sum = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t w = words[i], zero = F::is_zero(w), e = F::exponent(w);
    differs |= w ^ words[0];
    any |= w;
    zeros += zero;
    sum += e;  // a zero adds nothing: its exponent field is 0
    largest = e > largest ? e : largest;
  }
  if (!differs) {
    const uint32_t bytes = words[0] ? sizeof(Word) : 0;
    memcpy(tail, words, bytes);
    return {FILL, 0, 0, 0, bytes};
  }
  const uint32_t count = n - zeros, mean = (8 * sum + kTopBias * count) / (8 * (count ? count : 1));
  Form form = {16 * zeros >= n ? SPARSE : CASCADE, mean < largest ? mean : largest, 0, 0, 0};
  if (F::has_trim && any) {
    const uint32_t low = uint32_t(__builtin_ctz(any));
    form.trim = low < F::M ? low : F::M;
  }
  form.body = body_bytes<F>(form.mode, n, form.trim);
  if (form.mode == SPARSE) {
    form.tail = encode_sparse<F, Lanes>(words, n, form.top, form.trim, tail);
  } else {
    const uint32_t first = first_part_bytes(n, 1 + F::M - form.trim);
    form.tail = encode_elements<F, Lanes>(words, n, form.top, form.trim, body, tail);
    memset(body + first, 0, form.body - first);
  }
  const uint32_t raw = body_bytes<F>(RAW, n, 0);
  if (form.body + form.tail < raw) return form;
  memcpy(body, words, n * sizeof(Word));
  memset(body + n * sizeof(Word), 0, raw - n * sizeof(Word));
  return {RAW, 0, 0, raw, 0};
}

template <typename F, typename Lanes>
uint64_t encode(const uint8_t* input, uint64_t numel, uint32_t block, uint8_t* out) {
  using Word = typename F::Word;
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunks = (numel + per_chunk - 1) / per_chunk;
  uint64_t at = (4 * chunks + 15) / 16 * 16;
  if (!numel) return 0;  // the pointers may be null then
  memset(out, 0, at);
  // One block's worst case past the end: a tail is measured before it is known to lose against RAW.
  uint8_t tails[kChunkBlocks * kMaxBlock * sizeof(Word) + 8 * kMaxBlock];
  Word words[kMaxBlock];
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t offset = uint32_t(at / 16);
    memcpy(out + 4 * chunk, &offset, 4);
    const uint64_t start = chunk * per_chunk, here = numel - start < per_chunk ? numel - start : per_chunk;
    const uint32_t blocks = uint32_t((here + block - 1) / block);
    uint8_t* table = out + at;
    memset(table, 0, table_bytes<F>(blocks));
    at += table_bytes<F>(blocks);
    uint32_t tail = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
      const uint32_t n = uint32_t(here - uint64_t(b) * block < block ? here - uint64_t(b) * block : block);
      memcpy(words, input + (start + uint64_t(b) * block) * sizeof(Word), n * sizeof(Word));
      const Form form = encode_block<F, Lanes>(words, n, out + at, tails + tail);
      const uint16_t entry = uint16_t(form.mode << kTailBits | form.tail);
      table[b] = uint8_t(form.top);
      memcpy(table + blocks + 2 * b, &entry, 2);
      if (F::has_trim) table[3 * blocks + b] = uint8_t(form.trim);
      at += form.body;
      tail += form.tail;
    }
    memcpy(out + at, tails, tail);
    memset(out + at + tail, 0, pad16(tail) - tail);
    at += pad16(tail);
  }
  return at;
}

}  // namespace
}  // namespace zipccl


