// The C interface of row frames on the CPU (FORMAT.md, row frames): equal rows, factors and predictions, and payloads whose words are
// whole rows here and there. The callers have checked that every row lies in its memory.
#include "common/bits.h"
#include "cpu/chunks.h"
#include "cpu/interface.h"
#include "cpu/hash.h"

using namespace zipccl;

namespace {

constexpr uint64_t kTile = 64;     // rows whose memory is asked for at a time
constexpr uint64_t kWhole = 64;    // bytes of a row that is hashed whole
constexpr uint64_t kSample = 32;   // bytes of a place of a longer row that are hashed at first
constexpr uint64_t kApart = 4096;  // bytes of a row from place to place, or more: at most kPlaces of them
constexpr uint64_t kPlaces = 4;
constexpr uint64_t kAhead = 32;    // rows from which on places are asked for
constexpr uint64_t kSoon = 4;      // rows from which on the rows to compare are asked for
constexpr uint64_t kAsked = 1024;  // bytes of a row that are asked for before it is compared

// Finds the first row equal to a row. Entries of the table are a row's number + 1, below bits of its hash. A row's entry is at the hash of
// its samples; where another row has the same samples, as far as the entries tell, it is at the hash of the whole row. Many rows with equal
// samples thus cost a comparison and a hash each. An entry stays where it is, so that an equal row meets the same entries on its way.
class Finder {
 public:
  explicit Finder(const ZipcclSearch& search)
      : s_(search), places_(std::min(kPlaces, 1 + search.row_bytes / kApart)), step_(search.row_bytes / places_ / 64 * 64) {}

  uint64_t sampled(uint64_t row) const {
    const uint8_t* const from = at(row);
    uint64_t sum = kHashKeys.of[0][0];
    if (s_.row_bytes > kWhole) {
      for (uint64_t place = 0; place < places_; ++place) {
        const uint8_t* const sample = from + place * step_;
        prefetch(sample + kAhead * s_.row_bytes);
        for (uint32_t i = 0; i < kSample / 8; ++i) sum += product(load_word<uint64_t>(sample + 8 * i), uint32_t(place * kSample / 8 + i));
      }
    } else {
      uint64_t words[kWhole / 8] = {0};
      memcpy(words, from, s_.row_bytes);
      for (uint32_t i = 0; i < kWhole / 8; ++i) sum += product(words[i], i);
    }
    return hash_mix(sum) & s_.mask;
  }

  void ask(uint64_t row) const {
    for (uint64_t byte = 0; byte < std::min(s_.row_bytes, kAsked); byte += 64) prefetch(at(row) + byte);
  }

  // The row of the first entry that may be for equal samples; `row` itself, now entered, where there is none. One branch for both, because
  // repeats and others come in any order.
  uint64_t enter(uint64_t hash, uint64_t row) const {
    const uint32_t own = tag(hash) | uint32_t(row + 1);
    for (uint64_t slot = hash & (s_.slots - 1);; slot = (slot + 1) & (s_.slots - 1)) {
      const uint32_t entry = s_.table[slot], now = entry ? entry : own;
      if ((now ^ own) & ~number_mask()) continue;
      s_.table[slot] = now;
      return (now & number_mask()) - 1;
    }
  }

  bool equal(uint64_t row, uint64_t other) const { return !memcmp(at(row), at(other), s_.row_bytes); }

  // The first row equal to `row`, which has the samples of another row; `row` itself, now entered, where there is none.
  uint64_t enter_whole(uint64_t row) const {
    const uint64_t hash = whole(row);
    for (uint64_t slot = hash & (s_.slots - 1);; slot = (slot + 1) & (s_.slots - 1)) {
      uint32_t& entry = s_.table[slot];
      if (!entry) entry = tag(hash) | uint32_t(row + 1);
      const uint64_t other = (entry & number_mask()) - 1;
      if ((entry & ~number_mask()) == tag(hash) && (other == row || equal(row, other))) return other;
    }
  }

 private:
  const uint8_t* at(uint64_t row) const { return s_.data + row * s_.row_bytes; }
  uint32_t number_mask() const { return uint32_t(s_.slots - 1); }
  uint32_t tag(uint64_t hash) const { return uint32_t(hash >> 32) & ~number_mask(); }
  static uint64_t product(uint64_t x, uint32_t i) {
    const uint64_t key = kHashKeys.of[1][i];
    return uint64_t(uint32_t(x + key)) * uint32_t((x >> 32) + (key >> 32));
  }
  uint64_t whole(uint64_t row) const {
    constexpr uint64_t block = 8 * kHashWords;
    ZipcclLevel::HashBlocks* const hash_blocks = zipccl_chosen().hash;
    const uint64_t blocks = s_.row_bytes / block, rest = s_.row_bytes % block;
    uint64_t sums[2] = {0, 0};
    hash_blocks(kHashKeys.of, at(row), 0, blocks, sums);
    if (rest) {
      uint8_t last[block] = {0};
      memcpy(last, at(row) + blocks * block, rest);
      hash_blocks(kHashKeys.of, last, blocks, 1, sums);
    }
    return hash_mix(sums[0]) & s_.mask;
  }

  const ZipcclSearch& s_;
  const uint64_t places_, step_;  // of samples
};

// Calls each(i) for i below n, on as many of `threads` threads as so many rows are worth.
template <typename Each>
void each_row(uint64_t n, uint64_t row_bytes, int32_t threads, Each each) {
  threads = useful_threads(threads, n * row_bytes);
  if (threads == 1) {
    for (uint64_t i = 0; i < n; ++i) each(i);
    return;
  }
  each_part(n, kTile, n * row_bytes, threads, [&](uint64_t first, uint64_t count) {
    for (uint64_t i = first; i < first + count; ++i) each(i);
  });
}

// Where literals lie.
class Layout {
 public:
  Layout(const ZipcclLiterals& literals, uint32_t itemsize)
      : l_(literals), itemsize_(itemsize), rest_(l_.head + (l_.numel - l_.head) / l_.width * l_.width), numel_(numel(literals)) {}

  static uint64_t numel(const ZipcclLiterals& l) { return l.head + l.count * l.width + (l.numel - l.head) % l.width; }

  // The place of literal e, which exists, if n literals from there on lie side by side; else null.
  uint8_t* find(uint64_t e, uint64_t n) const {
    const uint64_t rows_end = l_.head + l_.count * l_.width;
    if (e + n <= l_.head || e >= rows_end) return place(e);
    if (e < l_.head || e + n > rows_end) return nullptr;
    const uint64_t i = (e - l_.head) / l_.width, last = (e + n - 1 - l_.head) / l_.width;
    return uint64_t(l_.rows[last] - l_.rows[i]) == last - i ? place(e) : nullptr;  // rows ascend
  }

  // Calls each(place, bytes) for the pieces of n literals from e on, row by row.
  template <typename Each>
  void pieces(uint64_t e, uint64_t n, Each each) const {
    const uint64_t rows_end = l_.head + l_.count * l_.width;
    for (uint64_t here; n; e += here, n -= here) {
      const uint64_t end = e < l_.head ? l_.head : e < rows_end ? e + l_.width - (e - l_.head) % l_.width : numel_;
      here = std::min(end - e, n);
      each(place(e), here * itemsize_);
    }
  }

  // A place to ask for in advance: of literal e, or any where there is none.
  const uint8_t* hint(uint64_t e) const { return e < numel_ ? place(e) : l_.words; }

 private:
  uint8_t* place(uint64_t e) const {
    uint64_t at = e;
    if (e >= l_.head) {
      const uint64_t i = (e - l_.head) / l_.width, within = (e - l_.head) % l_.width;
      at = i < l_.count ? l_.head + uint64_t(l_.rows[i]) * l_.width + within : rest_ + (e - l_.head - l_.count * l_.width);
    }
    return l_.words + at * itemsize_;
  }

  const ZipcclLiterals& l_;
  const uint32_t itemsize_;
  const uint64_t rest_, numel_;
};

// Encodes the literals, of `type`, to `out`, by a function as for encode_words. Returns the payload's bytes. A block whose words do not lie
// side by side is gathered in the cache first.
template <typename Function, typename... Rounding>
uint64_t encode_literals(const ZipcclLiterals& literals, ZipcclType type, uint32_t block, void* out, int32_t threads,
                         Function* encode_chunk, Rounding... rounding) {
  const uint32_t itemsize = kItemsize[type];
  const Layout layout(literals, itemsize);
  struct {
    uint64_t numel;
    void* out;
    uint64_t bytes;
  } one = {Layout::numel(literals), out, 0};
  const auto encode = [&](auto&, uint64_t at, uint32_t numel, void* workspace, ZipcclPart* parts, const uint8_t* soon) {
    static_assert(kChunkBlocks * kMaxBlock * 4 <= kZipcclGathered, "callers provide that much");
    const uint8_t *blocks[kChunkBlocks], *next[2 * kChunkBlocks];
    uint8_t* to = static_cast<uint8_t*>(workspace) + kZipcclWorkspace;  // the parts of RAW blocks are read after this call
    const uint64_t first = at / itemsize;
    for (uint32_t b = 0; b * block < numel; ++b) {
      const uint64_t e = first + uint64_t(b) * block, n = std::min(numel - b * block, block);
      for (uint32_t half = 0; half < 2; ++half) next[2 * b + half] = layout.hint(e + uint64_t(block) * kChunkBlocks + half * block / 2);
      blocks[b] = layout.find(e, n);
      if (blocks[b]) continue;
      blocks[b] = to;
      layout.pieces(e, n, [&](const uint8_t* from, uint64_t bytes) {
        memcpy(to, from, bytes);
        to += bytes;
      });
    }
    return encode_chunk(blocks, numel, block, rounding..., workspace, parts, soon, next);
  };
  encode_segments(&one, 1, type, block, threads, encode);
  return one.bytes;
}

}  // namespace

uint64_t zipccl_find_rows(const ZipcclSearch* search, int32_t threads) {
  const Finder finder(*search);
  threads = useful_threads(threads, search->count * search->row_bytes);
  const uint64_t tile = threads > 1 ? search->count : kTile;
  std::vector<uint64_t> hashes(std::min(tile, search->count));
  std::vector<uint32_t> found(hashes.size() + 1);  // rows of a tile that may repeat
  uint64_t repeats = 0;
  for (uint64_t done = 0; done < search->count; done += tile) {
    const uint64_t n = std::min(tile, search->count - done), first = search->first + done;
    int32_t* const sources = search->sources + done;
    each_row(n, search->row_bytes, threads, [&](uint64_t i) { hashes[i] = finder.sampled(first + i); });
    uint64_t some = 0;
    for (uint64_t i = 0; i < n; ++i) {
      const uint64_t source = finder.enter(hashes[i], first + i);
      sources[i] = int32_t(source);
      found[some] = uint32_t(i);
      hashes[some] = source;  // in the place of a hash that has been used
      some += source != first + i;
    }
    repeats += some;
    each_row(some, search->row_bytes, threads, [&](uint64_t k) {
      if (k + kSoon < some) finder.ask(hashes[k + kSoon]);
      if (!finder.equal(first + found[k], hashes[k])) sources[found[k]] = -1;
    });
    for (uint64_t k = 0; k < some; ++k) {
      const uint64_t i = found[k];
      if (sources[i] >= 0) continue;
      sources[i] = int32_t(finder.enter_whole(first + i));
      repeats -= uint64_t(sources[i]) == first + i;
    }
  }
  return repeats;
}

uint64_t zipccl_encode_rows(const ZipcclLiterals* literals, int32_t dtype, int32_t code, uint32_t mantissa, uint32_t block, void* out,
                            int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const ZipcclLevel& level = zipccl_chosen();
  if (mantissa) return encode_literals(*literals, type, block, out, threads, level.encode_rounded[type], mantissa);
  return encode_literals(*literals, type, block, out, threads, level.encode[type][code]);
}

int32_t zipccl_decode_rows(const void* payload, uint64_t bytes, const ZipcclLiterals* literals, int32_t dtype, int32_t rounded,
                           uint32_t block, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::Decode* const decode_chunk = rounded ? zipccl_chosen().decode_rounded[type] : zipccl_chosen().decode[type];
  const uint32_t itemsize = kItemsize[type];
  const Layout layout(*literals, itemsize);
  const uint64_t numel = Layout::numel(*literals), total = numel * itemsize;
  const auto decode = [&](const uint8_t* chunk, uint64_t chunk_bytes, uint64_t first, uint32_t n, bool) {
    alignas(64) uint8_t gathered[kChunkBlocks * kMaxBlock * 4];
    uint8_t* blocks[kChunkBlocks];
    uint32_t apart = 0;  // a bit for each block whose words do not lie side by side
    for (uint32_t b = 0; b * block < n; ++b) {
      const uint64_t size = std::min(n - b * block, block);
      blocks[b] = layout.find(first + uint64_t(b) * block, size);
      if (blocks[b]) continue;
      apart |= 1u << b;
      blocks[b] = gathered + uint64_t(b) * block * itemsize;
    }
    const int32_t status = decode_chunk(chunk, chunk_bytes, n, block, total >= kStreamBytes ? ~apart : 0, blocks);
    for (uint32_t b = 0; !status && b * block < n; ++b) {
      if (!(apart >> b & 1)) continue;
      const uint8_t* from = blocks[b];
      layout.pieces(first + uint64_t(b) * block, std::min(n - b * block, block), [&](uint8_t* to, uint64_t here) {
        memcpy(to, from, here);
        from += here;
      });
    }
    return status;
  };
  return each_chunk<0>(static_cast<const uint8_t*>(payload), bytes, numel, block, threads, total, decode);
}

void zipccl_copy_rows(uint8_t* data, uint64_t row_bytes, const int32_t* rows, const int32_t* sources, uint64_t count, int32_t threads) {
  each_row(count, row_bytes, threads, [&](uint64_t i) {
    memcpy(data + uint64_t(rows[i]) * row_bytes, data + uint64_t(sources[i]) * row_bytes, row_bytes);
  });
}

void zipccl_row_factors(const uint8_t* words, int32_t dtype, uint64_t width, const int32_t* rows, const int32_t* sources, uint64_t count,
                        uint32_t* factors, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::RowFactor* const factor = zipccl_chosen().row_factor[type];
  const uint64_t row_bytes = width * kItemsize[type];
  each_row(count, row_bytes, threads, [&](uint64_t i) {
    factors[i] = factor(words + uint64_t(sources[i]) * row_bytes, words + uint64_t(rows[i]) * row_bytes, width);
  });
}

void zipccl_predict_rows(const uint8_t* words, int32_t dtype, uint64_t width, const int32_t* sources, const uint32_t* factors,
                         uint64_t count, uint8_t* out, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  ZipcclLevel::PredictRow* const predict = zipccl_chosen().predict_row[type];
  const uint64_t row_bytes = width * kItemsize[type];
  each_row(count, row_bytes, threads, [&](uint64_t i) {
    predict(words + uint64_t(sources[i]) * row_bytes, width, factors[i], out + i * row_bytes);
  });
}
