// Encodes generated words, damages the payloads and decodes them at every level, to be built with AddressSanitizer and UBSan (asan.py).
// All buffers are exactly as large as their contents and often unaligned, so that a byte read or written outside is seen.
// Usage: fuzz SEED MUTATIONS SECONDS LEVEL...   Ends after that many mutations or seconds; the exit status is 0 if all went well. The digest
// of all payloads, words and refusals is the same on every CPU and with every compiler, for as many levels.
//        fuzz check FILE LEVEL..., fuzz repeat KERNEL TIMES FILE LEVEL   See cases.h.
#include <time.h>

#include <string>
#include <vector>

#include "cpu/interface.h"
#include "drawn.h"

namespace {

struct Case {
  int32_t dtype;  // FORMAT.md table 1.1; 6: the bytes of any dtype, in a delta payload
  uint32_t block;
  uint64_t numel;
  int32_t code;         // 2: delta, 3: rounded, to `kept` bits
  uint32_t kept;
  uint64_t item() const { return dtype == 3 ? 4 : dtype > 3 ? 1 : 2; }
  uint32_t mantissa() const { return dtype == 1 ? 7 : dtype == 2 ? 10 : dtype == 3 ? 23 : dtype == 13 ? 3 : 2; }
  uint32_t exponents() const { return dtype == 2 || dtype == 14 ? 31 : dtype == 13 ? 15 : 255; }
  uint32_t sign() const { return 1u << (8 * item() - 1); }
};

uint64_t pad16(uint64_t x) { return (x + 15) / 16 * 16; }

// FNV-1a over all results of the run, in eight lanes.
uint64_t digests[8];
void digest(const std::string& bytes) {
  for (uint64_t i = 0; i < bytes.size(); ++i) digests[i % 8] = (digests[i % 8] ^ uint8_t(bytes[i])) * 0x100000001B3;
  digests[0] = (digests[0] ^ bytes.size()) * 0x100000001B3;
}

// The bound of FORMAT.md section 3: index, tables, every block as large as raw, a padding for the tails of each chunk.
uint64_t bound(const Case& c) {
  const uint64_t per_chunk = 16 * uint64_t(c.block), chunks = (c.numel + per_chunk - 1) / per_chunk;
  uint64_t total = pad16(4 * chunks);
  for (uint64_t at = 0; at < c.numel; at += per_chunk) {
    const uint64_t here = c.numel - at < per_chunk ? c.numel - at : per_chunk, blocks = (here + c.block - 1) / c.block;
    total += pad16(blocks * (c.dtype == 3 || c.code == 3 ? 4 : 3)) + 16;
    for (uint64_t b = 0; b < here; b += c.block) total += pad16((here - b < c.block ? here - b : c.block) * c.item());
  }
  return total;
}

// Words of n elements with a texture drawn for them: zeros, a constant, anything, bell-shaped, sparse, with low bits cut off.
void generate(const Case& c, uint64_t n, uint8_t* words) {
  const uint64_t texture = below(10), middle = c.exponents() / 4 + below(c.exponents() / 2), constant = draw();
  const uint64_t zeros_in_64 = texture == 5 ? below(65) : texture == 6 ? 4 : 0, trim = below(c.mantissa() + 1);
  for (uint64_t i = 0; i < n; ++i) {
    uint32_t word = uint32_t(draw());
    if (texture == 0) word = 0;
    if (texture == 1) word = c.sign();
    if (texture == 2) word = uint32_t(constant);
    if (texture >= 4) {
      uint64_t e = middle - uint64_t(__builtin_ctzll(draw() | 1ull << 20));
      e += draw() % 8 == 0;
      if (texture == 7 && below(30) == 0) e = draw();
      word = (word & ~(c.exponents() << c.mantissa())) | (uint32_t(e) & c.exponents()) << c.mantissa();
    }
    if (texture == 9) {  // spread
      word = (word & ~(c.exponents() << c.mantissa())) | (uint32_t(middle + below(10)) & c.exponents()) << c.mantissa();
    }
    if (texture == 8) word = word >> trim << trim;
    if (below(64) < zeros_in_64) word = below(4) ? 0 : c.sign();
    memcpy(words + i * c.item(), &word, c.item());
  }
}

// A base of n words: equal words, words a few units away, and some random words. With `quiet`, one word in so many differs, or a run of them.
void change(const Case& c, uint64_t n, uint64_t quiet, const uint8_t* words, uint8_t* base) {
  const uint64_t in_64 = quiet ? 0 : below(65), reach = 1 + below(1ull << below(8)), replaced = quiet || below(4) ? 0 : below(65);
  uint64_t run = 0;
  for (uint64_t i = 0; i < n; ++i) {
    uint32_t word = 0;
    memcpy(&word, words + i * c.item(), c.item());
    if (quiet && !run && !below(quiet)) run = below(8) ? 1 : 1 + below(quiet);
    if (run || below(64) < in_64) word += uint32_t(below(2 * reach + 1) - reach);
    run -= run > 0;
    if (quiet && !below(64 * quiet)) word ^= c.sign();
    if (below(64) < replaced) word = uint32_t(draw());
    memcpy(base + i * c.item(), &word, c.item());
  }
}

// Damages `frame` in place, perhaps cutting or extending it, and perhaps the receiver's idea of it.
void damage(std::string& payload, Case& c) {
  const uint64_t kind = below(11), size = payload.size();
  const auto poke = [&](uint64_t from, uint64_t to) {
    if (from < to && to <= size) payload[from + below(to - from)] ^= char(1 + below(255));
  };
  const uint64_t chunks = (c.numel + 16 * c.block - 1) / (16 * c.block), index = pad16(4 * chunks);
  switch (kind) {
    case 0: payload.resize(below(size + 1)); break;
    case 1: {
      const uint64_t more = below(40);
      payload.append(more, char(draw()));
      break;
    }
    case 2: poke(0, 4 * chunks); break;
    case 3: poke(index, index + 128 < size ? index + 128 : size); break;  // the first table
    case 4: poke(0, size); break;
    case 5:
      for (uint64_t i = 0; i < 8; ++i) poke(0, size);
      break;
    case 6: c.numel = below(8) ? c.numel + below(130) : below(40000); break;
    case 7: c.block = 128u << below(4); break;
    case 8:
      for (uint64_t at = below(size + 1), end = at + below(64); at < end && at < size; ++at) payload[at] = char(draw());
      break;
    case 9: poke(index, index + 20 < size ? index + 20 : size); break;  // the first LIST's sets
    case 10:
      if (size) payload[below(size)] ^= char(1 << below(8));
      break;
  }
}

[[noreturn]] void fail(const char* what, const Case& c, const char* level) {
  printf("FAILED: %s: dtype %d, block %u, numel %llu, level %s\n", what, c.dtype, c.block, (unsigned long long)c.numel, level);
  exit(1);
}

std::string encode_everywhere(const Case& c, const std::vector<const char*>& levels, const Exact& words, const Exact& base) {
  std::string payload;
  for (const char* level : levels) {
    if (zipccl_force_level(level)) fail("no such level", c, level);
    Exact out(bound(c), below(16));
    ZipcclSegment segment = {words.data, c.numel, out.data, 0};
    uint64_t untrimmed = 0;
    if (c.code < 2) zipccl_encode(&segment, 1, c.dtype, c.code, c.block, 1);
    if (c.code == 2) segment.bytes = zipccl_delta_encode(words.data, base.data, c.numel, out.data, c.dtype, c.block, 1);
    if (c.code == 3) {
      zipccl_encode_rounded(&segment, 1, c.dtype, c.kept, c.block, &untrimmed, 1);
      Exact rounded(words.size(), below(16)), plain(out.size(), below(16));
      ZipcclSegment other = {rounded.data, c.numel, plain.data, 0};
      zipccl_round_words(words.data, c.numel, c.dtype, c.kept, rounded.data, 1);
      zipccl_encode(&other, 1, c.dtype, 0, c.block, 1);
      const uint64_t last = c.numel % c.block, spare = last && last < 64 ? 32 : 0;  // a short RAW block may count too much
      if (other.bytes > untrimmed || other.bytes + spare < untrimmed) fail("another size without trims", c, level);
    }
    if (segment.bytes > out.size()) fail("larger than the bound", c, level);
    const std::string now(reinterpret_cast<char*>(out.data), segment.bytes);
    if (level != levels[0] && now != payload) fail("levels write different bytes", c, level);
    payload = now;
  }
  digest(payload);
  return payload;
}

// The status, the same at every level; the words of the last level in `words`.
int32_t decode_everywhere(const Case& c, const std::vector<const char*>& levels, const std::string& payload, const Exact& base,
                          std::string& words) {
  int32_t status = 0;
  const uint64_t shift = below(16);
  Exact in(payload.size(), shift);
  if (in.size()) memcpy(in.data, payload.data(), payload.size());
  Exact own(c.numel * c.item(), shift);  // as much of the base as the receiver believes in
  for (uint64_t at = 0; base.size() && at < own.size(); at += base.size())
    memcpy(own.data + at, base.data, own.size() - at < base.size() ? own.size() - at : base.size());
  if (own.size() && !base.size()) memset(own.data, 0, own.size());
  for (const char* level : levels) {
    zipccl_force_level(level);
    Exact out(c.numel * c.item(), shift);
    const bool in_place = c.code == 2 && payload.size() % 2;
    if (in_place && out.size()) memcpy(out.data, own.data, out.size());
    const bool rounded = c.code == 3 && c.dtype < 3;  // float32 has exponent payloads
    const int32_t now = c.code != 2 ? zipccl_decode(in.data, in.size(), out.data, c.numel, c.dtype, rounded, c.block, ZIPCCL_WORDS, 1)
                                    : zipccl_delta_decode(in.data, in.size(), in_place ? out.data : own.data, out.data, c.numel, c.dtype,
                                                          c.block, 1);
    if (now != 0 && now != 11 && now != 12) fail("unknown status", c, level);
    if (level != levels[0] && now != status) fail("levels differ in status", c, level);
    status = now;
    if (c.dtype <= 3 && c.code != 2) {  // the same decoder before an addition
      const int32_t fp32_sums = int32_t(below(2));
      Exact sums(c.numel * (fp32_sums ? 4 : c.item()), shift);
      if (sums.size()) memset(sums.data, 0x3c, sums.size());
      const int32_t added = zipccl_decode(in.data, in.size(), sums.data, c.numel, c.dtype, rounded, c.block, ZIPCCL_SUMS + fp32_sums, 1);
      if (added != now) fail("decode_add differs", c, level);
    }
    if (status) continue;
    const std::string got(reinterpret_cast<char*>(out.data), out.size());
    if (level != levels[0] && got != words) fail("levels decode different words", c, level);
    words = got;
  }
  digest(status ? std::string(1, char(status)) : words);
  return status;
}

// The words as rows of a width, with a head and a tail, of which some are literals.
struct Rows {
  uint64_t width, head;
  std::vector<int32_t> literal;
  std::vector<bool> kept;  // for each word whether it is a literal
  Case inner;              // the literals side by side

  explicit Rows(const Case& c) : width(1 + below(below(4) ? 70 : 400)), head(below(width)), kept(c.numel, true), inner(c) {
    head = head < c.numel ? head : c.numel;
    const uint64_t share = below(9);
    for (uint64_t row = 0, at = head; at + width <= c.numel; ++row, at += width) {
      if (below(8) < share) literal.push_back(int32_t(row));
      for (uint64_t i = at; i < at + width && (literal.empty() || literal.back() != int32_t(row)); ++i) kept[i] = false;
    }
    inner.numel = 0;
    for (const bool one : kept) inner.numel += one;
  }
  ZipcclLiterals in(const Case& c, uint8_t* words) const { return {words, c.numel, width, head, literal.data(), literal.size()}; }
};

// The literals of `words` as a payload, the same as that of a copy of them; then damaged payloads, of which no byte reaches another word.
void rows_everywhere(const Case& c, const std::vector<const char*>& levels, const Exact& words) {
  const Rows rows(c);
  Exact copy(rows.inner.numel * c.item(), below(16));
  for (uint64_t i = 0, at = 0; i < c.numel; ++i)
    if (rows.kept[i]) memcpy(copy.data + c.item() * at++, words.data + c.item() * i, c.item());
  const std::string payload = encode_everywhere(rows.inner, levels, copy, copy);
  for (const char* level : levels) {
    zipccl_force_level(level);
    Exact out(bound(rows.inner), below(16));
    const ZipcclLiterals literals = rows.in(c, words.data);
    const uint64_t size = zipccl_encode_rows(&literals, c.dtype, c.code == 3 ? 0 : c.code, c.code == 3 ? c.kept : 0, c.block, out.data, 1);
    if (size != payload.size() || (size && memcmp(out.data, payload.data(), size))) fail("rows are another payload than a copy", c, level);
  }
  for (int i = 0; i < 8; ++i) {
    std::string damaged = payload, first;
    Case receiver = rows.inner;
    if (i) damage(damaged, receiver);
    const uint64_t shift = below(16);
    Exact in(damaged.size(), shift);
    if (in.size()) memcpy(in.data, damaged.data(), damaged.size());
    int32_t status = 0;
    for (const char* level : levels) {
      zipccl_force_level(level);
      Exact out(words.size(), shift);
      if (out.size()) memset(out.data, 0x5a, out.size());
      const ZipcclLiterals literals = rows.in(c, out.data);
      const int32_t now = zipccl_decode_rows(in.data, in.size(), &literals, c.dtype, c.code == 3 && c.dtype < 3, receiver.block, 1);
      if ((now && !i) || (now != 0 && now != 11 && now != 12)) fail("rows refused, or for no known reason", c, level);
      if (level != levels[0] && now != status) fail("levels differ in the status of rows", c, level);
      status = now;
      std::string got;
      for (uint64_t w = 0; w < out.size(); ++w) {
        if (!rows.kept[w / c.item()] && out.data[w] != 0x5a) fail("a row that is no literal was written", c, level);
        if (!i && rows.kept[w / c.item()] && out.data[w] != words.data[w]) fail("literals differ", c, level);
        if (!now) got.push_back(char(out.data[w]));
      }
      if (level != levels[0] && got != first) fail("levels decode different rows", c, level);
      first = got;
    }
  }
}

// Equal rows against a comparison of all of them, with hashes of a few bits too; factors and predictions in memory of their size.
void search_and_predict(const Case& c, const std::vector<const char*>& levels, const Exact& words) {
  const uint64_t width = 1 + below(40), row_bytes = width * c.item(), count = c.numel / width < 300 ? c.numel / width : 300;
  if (!count) return;
  Exact data(count * row_bytes, below(16));
  memcpy(data.data, words.data, data.size());
  for (uint64_t i = 0, few = below(count); i < few; ++i)
    memcpy(data.data + below(count) * row_bytes, std::string(data.data, data.data + row_bytes).data(), row_bytes);
  uint64_t slots = 2;
  while (slots < 2 * count) slots *= 2;
  const uint64_t cut = below(count + 1), mask = below(3) ? ~0ull : below(4);
  std::string factors, predictions;
  for (const char* level : levels) {
    zipccl_force_level(level);
    std::vector<uint32_t> table(slots, 0);
    std::vector<int32_t> sources(count, -7);
    const ZipcclSearch before = {data.data, row_bytes, 0, cut, sources.data(), table.data(), slots, mask};
    const ZipcclSearch after = {data.data, row_bytes, cut, count - cut, sources.data() + cut, table.data(), slots, mask};
    uint64_t repeats = zipccl_find_rows(&before, 1) + zipccl_find_rows(&after, 1);
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t first = 0;
      while (memcmp(data.data + first * row_bytes, data.data + i * row_bytes, row_bytes)) ++first;
      if (sources[i] != int32_t(first)) fail("another row than the first equal one", c, level);
      repeats -= first != i;
    }
    if (repeats) fail("another number of repeats", c, level);
    if (c.dtype > 3) continue;
    Exact found(4 * count, 4 * below(4)), out(data.size(), below(16));
    std::vector<int32_t> own(count);
    for (uint64_t i = 0; i < count; ++i) own[i] = int32_t(i), sources[i] = int32_t(count - 1 - i);
    zipccl_row_factors(data.data, c.dtype, width, own.data(), sources.data(), count, reinterpret_cast<uint32_t*>(found.data), 1);
    const std::string now(reinterpret_cast<char*>(found.data), found.size());
    for (uint64_t i = 0; i < count; ++i)
      if (const uint32_t one = 0x3f000000 + uint32_t(i << 12); found.data[4 * i + 3] == 0) memcpy(found.data + 4 * i, &one, 4);
    zipccl_predict_rows(data.data, c.dtype, width, sources.data(), reinterpret_cast<uint32_t*>(found.data), count, out.data, 1);
    const std::string made(reinterpret_cast<char*>(out.data), out.size());
    if (level != levels[0] && (now != factors || made != predictions)) fail("levels differ in factors or predictions", c, level);
    factors = now;
    predictions = made;
  }
  digest(factors + predictions);
}

}  // namespace
#include "cases.h"
#include "fuzz_scaled.h"
int main(int argc, char** argv) {
  const std::string mode = argc < 4 ? "" : argv[1];
  if (mode == "check") return check(argv[2], {argv + 3, argv + argc});
  if (mode == "repeat" && argc == 6) return repeat(argv[2], strtoull(argv[3], nullptr, 10), argv[4], argv[5]);
  if (argc < 5) return fprintf(stderr, "usage: the first lines of fuzz.cpp\n"), 2;
  state = strtoull(argv[1], nullptr, 10);
  const uint64_t mutations = strtoull(argv[2], nullptr, 10);
  const time_t end = time(nullptr) + atol(argv[3]);
  const std::vector<const char*> levels(argv + 4, argv + argc);
  uint64_t done = 0, payloads = 0, refused = 0, lists[15] = {0}, count[13] = {0};
  std::string decoded;
  while (done < mutations && time(nullptr) < end) {
    const int32_t dtypes[] = {1, 2, 3, 13, 14};
    Case c{dtypes[below(5)], 128u << below(4), 0, int32_t(below(2)), 1 + uint32_t(below(6))};
    if (below(2)) {
      c.code = 2;
      if (c.dtype > 3) c.dtype = 6;
    } else if (c.dtype <= 3 && below(3) == 0) {
      c.code = 3;
    }
    const uint64_t quiet = below(2) ? 4ull << below(9) : 0;
    const uint64_t lengths[] = {below(70), below(300), c.block - 1 + below(3), below(5 * c.block), 16 * 128 + below(200)};
    c.numel = lengths[below(c.block == 128 ? 5 : 4)];
    Exact words(c.numel * c.item(), below(16));
    for (uint64_t at = 0; at < c.numel; at += c.block)
      generate(c, c.numel - at < c.block ? c.numel - at : c.block, words.data + at * c.item());
    Exact base(words.size(), below(16));
    for (uint64_t at = 0; at < c.numel; at += c.block)
      change(c, c.numel - at < c.block ? c.numel - at : c.block, quiet, words.data + at * c.item(), base.data + at * c.item());
    const std::string payload = encode_everywhere(c, levels, words, base);
    lists[c.dtype] += c.code == 2 && c.numel && uint8_t(payload[3]) >> 7;
    if (decode_everywhere(c, levels, payload, base, decoded)) fail("refused its own payload", c, levels[0]);
    if (c.code == 3) zipccl_round_words(words.data, c.numel, c.dtype, c.kept, words.data, 1);
    if (words.size() && memcmp(words.data, decoded.data(), words.size())) fail("not the same words", c, levels[0]);
    if (c.code != 2) rows_everywhere(c, levels, words);
    if (c.code < 2) search_and_predict(c, levels, words);
    if (c.dtype <= 3) refused += scaled_everywhere(c, levels, words);
    ++payloads;
    for (int i = 0; i < 40; ++i, ++done) {
      std::string damaged = payload;
      Case receiver = c;
      damage(damaged, receiver);
      ++count[decode_everywhere(receiver, levels, damaged, base, decoded)];
    }
  }
  for (const int32_t dtype : {1, 2, 3, 6})
    if (payloads > 1000 && (lists[dtype] * 100 < payloads || refused * 4 < payloads)) return printf("FAILED: %d: few LISTs or refusals\n", dtype), 1;
  uint64_t all = 0;
  for (const uint64_t each : digests) all = all * 0x9E3779B97F4A7C15 + each;
  printf("payloads %llu mutations %llu accepted %llu index %llu block %llu digest %llu\n", (unsigned long long)payloads,
         (unsigned long long)done, (unsigned long long)count[0], (unsigned long long)count[11], (unsigned long long)count[12],
         (unsigned long long)all);
}
