// ZFP in one dimension at a fixed rate (FORMAT.md 2.11): the codes of a payload, without its fields. One implementation for every level, of
// integers: no flushed denormal and no rounding mode changes a bit.
#include "common/bits.h"
#include "common/zfp_block.cuh"
#include "cpu/chunks.h"
#include "cpu/interface.h"

using namespace zipccl;

namespace {

constexpr uint32_t kUnit = 16 * kZfpValues;  // values whose codes are whole words of 64 bits, as many as the rate
constexpr uint32_t kAdded = 4 * kUnit;       // values that are decoded at a time, before they are added

struct Tables {
  ZfpPlane codes[kZfpValues + 1][1 << kZfpValues];
  ZfpPlane planes[kZfpValues + 1][1 << kZfpPlaneBits];
  ZfpPlane code(uint32_t n, uint32_t plane) const { return codes[n][plane]; }
  ZfpPlane plane(uint32_t n, uint32_t bits) const { return planes[n][bits]; }
};
constexpr Tables make_tables() {
  Tables tables = {};
  for (uint32_t n = 0; n <= kZfpValues; ++n) {
    for (uint32_t plane = 0; plane < 1 << kZfpValues; ++plane) tables.codes[n][plane] = zfp_code_plane(n, plane);
    for (uint32_t bits = 0; bits < 1 << kZfpPlaneBits; ++bits) tables.planes[n][bits] = zfp_plane_of(n, bits, kZfpPlaneBits);
  }
  return tables;
}
constexpr Tables kTables = make_tables();

struct Code {  // of a block: 4 rate bits
  using Bits = unsigned __int128;
  Bits bits = 0;
  void put(uint32_t at, uint32_t more) { bits |= Bits(more) << at; }
  uint32_t from(uint32_t at) const { return uint32_t(bits >> at); }
  bool some() const { return bits & 1; }
  void keep(uint32_t count) {
    if (count < 128) bits &= (Bits(1) << count) - 1;
  }
};

// The values of the block that begins at `from`, of which `count` are left; more than four count as four.
template <typename F>
ZfpBlock load_block(const uint8_t* from, uint64_t count) {
  using Word = typename F::Word;
  ZfpBlock block;
  for (uint32_t i = 0; i < kZfpValues; ++i) {
    block.word[i] = as_bits(Values<F>::from(load_word<Word>(from + zfp_source(i, count) * sizeof(Word))));
  }
  return block;
}

template <typename F>
void store_block(const ZfpBlock& block, uint8_t* to, uint64_t count) {
  using Word = typename F::Word;
  for (uint32_t i = 0; i < kZfpValues && i < count; ++i) {
    const Word word = finite_word<F>(block.word[i]);
    memcpy(to + i * sizeof word, &word, sizeof word);
  }
}

// Encodes n words to as many whole words of 64 bits as their codes need. Returns whether all are finite.
template <typename F>
bool encode_words(const uint8_t* words, uint64_t n, uint32_t rate, uint8_t* out) {
  uint64_t pending = 0;
  uint32_t fill = 0;
  const auto put = [&](uint64_t bits, uint32_t count) {  // at most 64 bits, with zeros past them
    pending |= bits << fill;
    if ((fill += count) < 64) return;
    memcpy(out, &pending, 8);
    out += 8, fill -= 64;
    pending = fill ? bits >> (count - fill) : 0;
  };
  for (uint64_t at = 0; at < n; at += kZfpValues) {
    const ZfpBlock block = load_block<F>(words + at * sizeof(typename F::Word), n - at);
    if (!block.finite()) return false;
    const Code::Bits code = zfp_encode<Code>(block, rate, kTables).bits;
    const uint32_t bits = kZfpValues * rate;
    put(uint64_t(code), std::min(bits, 64u));
    if (bits > 64) put(uint64_t(code >> 64), bits - 64);
  }
  if (fill) memcpy(out, &pending, 8);
  return true;
}

// Decodes n words from as many whole words of 64 bits as their codes need.
template <typename F>
void decode_words(const uint8_t* codes, uint64_t n, uint32_t rate, uint8_t* words) {
  const uint32_t bits = kZfpValues * rate;
  const auto take = [&](uint64_t bit, uint32_t count) {  // at most 64; reads only words that hold asked bits
    const uint32_t shift = bit % 64;
    uint64_t found = load_word<uint64_t>(codes + bit / 64 * 8) >> shift;
    if (shift + count > 64) found |= load_word<uint64_t>(codes + bit / 64 * 8 + 8) << (64 - shift);
    return found & ones(count);
  };
  for (uint64_t at = 0, bit = 0; at < n; at += kZfpValues, bit += bits) {
    Code code = {take(bit, std::min(bits, 64u))};
    if (bits > 64) code.bits |= Code::Bits(take(bit + 64, bits - 64)) << 64;
    store_block<F>(zfp_decode(code, rate, kTables), words + at * sizeof(typename F::Word), n - at);
  }
}

// The words that a receiver would get; a block that is not finite stays. `out` may be `words`.
template <typename F>
void project_words(const uint8_t* words, uint64_t n, uint32_t rate, uint8_t* out) {
  constexpr uint32_t itemsize = sizeof(typename F::Word);
  for (uint64_t at = 0; at < n; at += kZfpValues) {
    const ZfpBlock block = load_block<F>(words + at * itemsize, n - at);
    if (block.finite()) {
      store_block<F>(zfp_decode(zfp_encode<Code>(block, rate, kTables), rate, kTables), out + at * itemsize, n - at);
    } else {
      memmove(out + at * itemsize, words + at * itemsize, std::min<uint64_t>(n - at, kZfpValues) * itemsize);
    }
  }
}

struct Functions {
  bool (*encode)(const uint8_t* words, uint64_t n, uint32_t rate, uint8_t* out);
  void (*decode)(const uint8_t* codes, uint64_t n, uint32_t rate, uint8_t* words);
  void (*project)(const uint8_t* words, uint64_t n, uint32_t rate, uint8_t* out);
};
template <typename F>
constexpr Functions functions() {
  return {encode_words<F>, decode_words<F>, project_words<F>};
}
static_assert(ZIPCCL_BF16 == 0 && ZIPCCL_FP16 == 1 && ZIPCCL_FP32 == 2, "the order of the table");
constexpr Functions kFunctions[] = {functions<Bf16>(), functions<Fp16>(), functions<Fp32>()};

// Threads call each(first word, words, bytes of the codes in front of them) for parts of numel words; only the last has a part of a unit.
template <typename Each>
void each_units(uint64_t numel, uint32_t itemsize, uint32_t rate, int32_t threads, Each each) {
  static_assert(kBytesPerThread / 4 % kUnit == 0, "parts begin with a unit");
  each_part(numel, kBytesPerThread / itemsize, numel * itemsize, threads,
            [&](uint64_t first, uint64_t n) { each(first, n, first / kUnit * rate * 8); });
}

}  // namespace

int32_t zipccl_zfp_encode(const uint8_t* words, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t threads) {
  const uint32_t type = type_of(dtype), itemsize = kItemsize[type];
  std::atomic<bool> finite{true};
  each_units(numel, itemsize, rate, threads, [&](uint64_t first, uint64_t n, uint64_t bytes) {
    if (!kFunctions[type].encode(words + first * itemsize, n, rate, out + bytes)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

void zipccl_zfp_decode(const uint8_t* codes, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t into, int32_t threads) {
  const uint32_t type = type_of(dtype), itemsize = kItemsize[type], size = into == ZIPCCL_FP32_SUMS ? 4 : itemsize;
  ZipcclLevel::AddWords* const add_words = zipccl_chosen().add_words[type][into == ZIPCCL_FP32_SUMS];
  each_units(numel, itemsize, rate, threads, [&](uint64_t first, uint64_t n, uint64_t bytes) {
    if (!into) return kFunctions[type].decode(codes + bytes, n, rate, out + first * itemsize);
    uint8_t values[4 * kAdded];
    for (uint64_t at = 0; at < n; at += kAdded) {
      const uint64_t count = std::min<uint64_t>(n - at, kAdded);
      kFunctions[type].decode(codes + bytes + at / kUnit * rate * 8, count, rate, values);
      add_words(values, count, out + (first + at) * size);
    }
  });
}

void zipccl_zfp_project(const uint8_t* words, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t threads) {
  const uint32_t type = type_of(dtype), itemsize = kItemsize[type];
  each_units(numel, itemsize, rate, threads, [&](uint64_t first, uint64_t n, uint64_t) {
    kFunctions[type].project(words + first * itemsize, n, rate, out + first * itemsize);
  });
}
