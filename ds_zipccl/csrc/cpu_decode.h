// Exponent payload decoder for the CPU; `Lanes` does the 64-element steps. Everything read is proven to lie in the payload first (FORMAT.md section 4).
#pragma once
#include "bits.h"
#include "exponent_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kTailMax = 1u << kTailBits;

// Ones of the AND of two bit strings of n bits that start at bits `low` and `high` of `bytes`.
uint32_t count_both(const uint8_t* bytes, uint32_t low, uint32_t high, uint32_t n) {
  uint32_t count = 0;
  for (uint32_t at = 0; at < n; at += 64) {
    const uint32_t here = n - at < 64 ? n - at : 64;
    count += popcount(read_bits(bytes, low + at, here) & read_bits(bytes, high + at, here));
  }
  return count;
}

// Decodes m coded elements (FORMAT.md 2.1). `first` has the whole first part; `second` has `bytes` bytes and 16 readable ones after
// them, and must be used up exactly.
template <typename F, typename Lanes>
Status decode_elements(const uint8_t* first, const uint8_t* second, uint32_t bytes, uint32_t m, uint32_t top, uint32_t trim,
                       typename F::Word* words) {
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  const uint32_t r = 1 + F::M - trim, planes = r % 8, plane = plane_bytes(m);
  const uint8_t* bit_planes = first + r / 8 * m;
  const uint8_t* tier1 = bit_planes + planes * plane;

  uint32_t left = 0, at_bit[2 * (kTiers - 1)], end = 0;
  for (uint32_t at = 0; at < m; at += 64) {
    const uint32_t n = m - at < 64 ? m - at : 64;
    left += popcount(load_plane(tier1, at, n) & load_plane(tier1 + plane, at, n));
  }
  for (uint32_t tier = 0; tier < kTiers - 1; ++tier) {
    at_bit[2 * tier] = end;
    at_bit[2 * tier + 1] = end + left;
    end += 2 * left;
    if (end > 8 * bytes) return BLOCK;
    left = count_both(second, at_bit[2 * tier], at_bit[2 * tier + 1], left);
  }
  if ((end + 7) / 8 + left != bytes) return BLOCK;
  const uint8_t* raw = second + (end + 7) / 8;

  // Inlined twice: with n = 64 every copy has a fixed size.
  const auto step = [&](uint32_t at, uint32_t n) __attribute__((always_inline)) {
    uint64_t codes[2 * kTiers] = {load_plane(tier1, at, n), load_plane(tier1 + plane, at, n)};
    uint64_t escaped = codes[0] & codes[1];
    for (uint32_t tier = 1; tier < kTiers && escaped; ++tier) {
      const uint32_t count = popcount(escaped);
      codes[2 * tier] = expand_bits(read_bits(second, at_bit[2 * tier - 2], count), escaped);
      codes[2 * tier + 1] = expand_bits(read_bits(second, at_bit[2 * tier - 1], count), escaped);
      at_bit[2 * tier - 2] += count;
      at_bit[2 * tier - 1] += count;
      escaped = codes[2 * tier] & codes[2 * tier + 1];
    }
    uint8_t exponent[64], part[64] = {0};
    Lanes::exponents(codes, top, exponent);
    for (; escaped; escaped &= escaped - 1) exponent[__builtin_ctzll(escaped)] = *raw++;

    typename F::Word rest[64] = {0}, group[64];
    if (planes) {
      uint64_t bits[8] = {0};
      for (uint32_t p = 0; p < planes; ++p) bits[p] = load_plane(bit_planes + p * plane, at, n);
      Lanes::bytes_of(bits, planes, part);
      for (uint32_t i = 0; i < 64; ++i) rest[i] = typename F::Word(part[i]) << r / 8 * 8;
    }
    for (uint32_t byte = 0; byte < r / 8; ++byte) {
      memcpy(part, first + byte * m + at, n);
      for (uint32_t i = 0; i < 64; ++i) rest[i] |= typename F::Word(typename F::Word(part[i]) << 8 * byte);
    }
    for (uint32_t i = 0; i < 64; ++i) group[i] = F::join(typename F::Word(rest[i] << trim), exponent[i]);
    memcpy(words + at, group, n * sizeof(group[0]));
  };
  uint32_t at = 0;
  for (; at + 64 <= m; at += 64) step(at, 64);
  if (at < m) step(at, m - at);
  return OK;
}

// Decodes a SPARSE tail of `bytes` bytes (16 more are readable).
template <typename F, typename Lanes>
Status decode_sparse(const uint8_t* tail, uint32_t bytes, uint32_t n, uint32_t top, uint32_t trim, typename F::Word* words) {
  const uint32_t plane = plane_bytes(n);
  if (bytes < 1 + plane || tail[0] > 1) return BLOCK;
  const uint8_t* map = tail + 1;
  uint32_t zeros = 0;
  for (uint32_t at = 0; at < n; at += 64) zeros += popcount(load_plane(map, at, n - at < 64 ? n - at : 64));
  const uint32_t m = n - zeros, signs_at = 1 + plane, at = signs_at + (tail[0] ? plane_bytes(zeros) : 0);
  const uint32_t first = first_part_bytes(m, 1 + F::M - trim);
  if (at + first > bytes) return BLOCK;
  typename F::Word others[kMaxBlock];
  const Status status = decode_elements<F, Lanes>(tail + at, tail + at + first, bytes - at - first, m, top, trim, others);
  if (status) return status;
  uint32_t zero = 0, other = 0;
  for (uint32_t i = 0; i < n; ++i) {
    if (map[i / 8] >> i % 8 & 1) {
      const bool negative = tail[0] && (tail[signs_at + zero / 8] >> zero % 8 & 1);
      words[i] = typename F::Word(negative ? F::negative_zero() : 0);
      ++zero;
    } else {
      words[i] = others[other++];
    }
  }
  return OK;
}

template <typename F, typename Lanes>
Status decode_chunk(const uint8_t* chunk, uint64_t bytes, uint64_t numel, uint32_t block, uint8_t* out) {
  using Word = typename F::Word;
  const uint32_t blocks = uint32_t((numel + block - 1) / block);
  uint64_t body = table_bytes<F>(blocks), tail = body;
  if (body > bytes) return BLOCK;
  uint16_t entries[kChunkBlocks];
  memcpy(entries, chunk + blocks, 2 * blocks);
  const uint8_t* trims = chunk + 3 * blocks;
  const uint32_t last = uint32_t(numel - uint64_t(blocks - 1) * block);
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t mode = entries[b] >> kTailBits, trim = F::has_trim ? trims[b] : 0;
    if (mode > SPARSE || trim > F::M) return BLOCK;
    tail += body_bytes<F>(mode, b + 1 < blocks ? block : last, trim);
  }
  for (uint32_t b = 0; b < blocks; ++b) {
    const uint32_t mode = entries[b] >> kTailBits, tail_bytes = entries[b] & (kTailMax - 1);
    const uint32_t n = b + 1 < blocks ? block : last, trim = F::has_trim ? trims[b] : 0;
    if (tail + tail_bytes > bytes) return BLOCK;
    // A copy with room to read past its end: bit strings are read eight bytes at a time.
    uint8_t local[kTailMax + 16];
    memcpy(local, chunk + tail, tail_bytes);
    memset(local + tail_bytes, 0, 16);
    Word words[kMaxBlock];
    Status status = OK;
    switch (mode) {
      case FILL: {
        if (tail_bytes != 0 && tail_bytes != sizeof(Word)) return BLOCK;
        Word word = 0;
        memcpy(&word, local, tail_bytes);
        for (uint32_t i = 0; i < n; ++i) words[i] = word;
        break;
      }
      case RAW:
        if (tail_bytes) return BLOCK;
        memcpy(words, chunk + body, n * sizeof(Word));
        break;
      case CASCADE: status = decode_elements<F, Lanes>(chunk + body, local, tail_bytes, n, chunk[b], trim, words); break;
      case SPARSE: status = decode_sparse<F, Lanes>(local, tail_bytes, n, chunk[b], trim, words); break;
    }
    if (status) return status;
    memcpy(out + uint64_t(b) * block * sizeof(Word), words, n * sizeof(Word));
    body += body_bytes<F>(mode, n, trim);
    tail += tail_bytes;
  }
  return (tail + 15) / 16 * 16 == bytes ? OK : BLOCK;
}

template <typename F, typename Lanes>
int32_t decode(const uint8_t* payload, uint64_t bytes, uint64_t numel, uint32_t block, uint8_t* out) {
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunks = (numel + per_chunk - 1) / per_chunk;
  uint64_t at = (4 * chunks + 15) / 16 * 16;
  if (at > bytes) return INDEX;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    uint32_t offset, next;
    memcpy(&offset, payload + 4 * chunk, 4);
    uint64_t end = bytes;
    if (chunk + 1 < chunks) {
      memcpy(&next, payload + 4 * chunk + 4, 4);
      end = uint64_t(next) * 16;
    }
    if (uint64_t(offset) * 16 != at || end < at || end > bytes) return INDEX;
    const uint64_t start = chunk * per_chunk, here = numel - start < per_chunk ? numel - start : per_chunk;
    const Status status = decode_chunk<F, Lanes>(payload + at, end - at, here, block, out + start * sizeof(typename F::Word));
    if (status) return status;
    at = end;
  }
  return at == bytes ? OK : INDEX;
}

}  // namespace
}  // namespace zipccl

