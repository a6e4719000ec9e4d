// The C interface of the library of CPU kernels: every struct and every function that it exports. kernels/cpp/interface.py has the same
// table for ctypes. Callers have checked that every row lies in its memory.
#pragma once
#include <stdint.h>

#include "common/scaling.cuh"  // ZipcclScaling, which the CUDA kernels have too

// One payload to be encoded: numel words to `out`, which must hold the bound of its payload; `bytes` is the result.
struct ZipcclSegment {
  const void* words;
  uint64_t numel;
  void* out;
  uint64_t bytes;
};

// Rows to look for: rows first to first + count - 1, of `row_bytes` each, row 0 at `data`. `table` has `slots` entries, a power of 2 and
// at least twice as many as there are rows. `mask`: the bits of hashes that count.
struct ZipcclSearch {
  const uint8_t* data;
  uint64_t row_bytes, first, count;
  int32_t* sources;
  uint32_t* table;
  uint64_t slots, mask;
};

// The literals of a frame of numel words: the first `head`, then `count` of the rows of `width` words behind them, in ascending order, then
// the words behind the last whole row.
struct ZipcclLiterals {
  uint8_t* words;
  uint64_t numel, width, head;
  const int32_t* rows;
  uint64_t count;
};

// The map of a frame with `count` whole rows, of which `repeats` repeat, by distances of `bits` (at most 32) bits; 16 bytes more are
// readable. The receiver holds `reach` rows in front. The results: the literals, from row 0 of the frame on, the repeated rows and their
// sources, from the first row of the receiver on.
struct ZipcclMap {
  const uint8_t* map;
  uint64_t count, repeats, bits, reach;
  int32_t *literals, *repeated, *sources;
};

// A segment whose frames are made one after the other, in order. Of `search`, `first` rows have been seen, of which `repeats` repeat
// earlier ones; `sources` is that of row 0. `literals` has room for as many numbers as a frame has rows. `nested`: the first half of the
// header of a frame of coded literals, of `dtype`, with `code` and `block`; literals of fewer bytes than `raw_below` are raw. Both are
// rounded to `mantissa` bits unless that is zero. A row frame saves `worth` of the bytes of its repeated rows, or there is none.
struct ZipcclRowSegment {
  ZipcclSearch search;
  uint64_t repeats, width, itemsize, raw_below;
  double worth;
  int32_t* literals;
  uint8_t nested[16];
  int32_t dtype, code;
  uint32_t block, mantissa;
};

// `into`, what a decoder does with numel words of `dtype`: writes them, or adds them to sums, of `dtype` (1 to 3) itself, each rounded to
// it, or floats. Words are added as zipccl_add adds them: with the denormals of this thread.
enum ZipcclInto { ZIPCCL_WORDS, ZIPCCL_SUMS, ZIPCCL_FP32_SUMS };

extern "C" {
// --- cpu/dispatch.cpp
// Name of the level in use.
const char* zipccl_level();
// Uses the named level from now on, or the best one for "auto". Returns 0, or 1 where it does not exist or the CPU lacks it.
int32_t zipccl_force_level(const char* name);

// --- cpu/hash.cpp
// Hash of `bytes` bytes with the two u64 of `key`: two u64 to `hash`.
void zipccl_hash(const void* data, uint64_t bytes, const uint64_t* key, uint64_t* hash, int32_t threads);

// --- cpu/payload.cpp
// Encodes `count` segments of `dtype` with `code` (0 cascade, 1 wide).
void zipccl_encode(ZipcclSegment* segments, uint32_t count, int32_t dtype, int32_t code, uint32_t block, int32_t threads);
// Decodes a payload of `bytes` bytes, a rounded one (of `dtype` 1 or 2) if `rounded`. Returns 0 or a FrameErrorCode; the words or sums at
// `out` are then undefined.
int32_t zipccl_decode(const void* payload, uint64_t bytes, void* out, uint64_t numel, int32_t dtype, int32_t rounded, uint32_t block,
                      int32_t into, int32_t threads);
// Adds numel words of `dtype` (1 to 3) to sums: of `dtype` itself, each rounded to it, or floats if `fp32_sums`.
void zipccl_add(const void* words, uint64_t numel, void* sums, int32_t dtype, int32_t fp32_sums, int32_t threads);
// The squares of values - words, and those of words, summed over the numel words of `dtype` (1 to 3) that are finite: two sums. They depend
// on no number of threads.
void zipccl_squared_error(const void* words, const void* values, uint64_t numel, int32_t dtype, double* sums, int32_t threads);

// --- cpu/delta/delta.cpp
// Encodes numel words of `dtype` (1 to 3, or 6: bytes) against as many at `base` to `out`, which must hold payload_bound()
// (DELTA of codecs/exponent.py) bytes. Returns the payload's bytes.
uint64_t zipccl_delta_encode(const void* words, const void* base, uint64_t numel, void* out, int32_t dtype, uint32_t block,
                             int32_t threads);
// Decodes a payload of `bytes` bytes against numel words of `dtype` (1 to 3, or 6: bytes) at `base` to `words`, which are the same memory
// or apart from it. Returns 0 or a FrameErrorCode; the words are then undefined.
int32_t zipccl_delta_decode(const void* payload, uint64_t bytes, const void* base, void* words, uint64_t numel, int32_t dtype,
                            uint32_t block, int32_t threads);

// --- cpu/rows/rows.cpp
// Writes to `sources` the number of the first row that each row equals, its own where there is none before it. Returns how many rows equal
// an earlier one.
uint64_t zipccl_find_rows(const ZipcclSearch* search, int32_t threads);
// Encodes the literals, of `dtype`, with `code` to `out`, which must hold payload_bound() (codecs/exponent.py) bytes; with `mantissa` above
// 0, of `dtype` 1 to 3, as zipccl_encode_rounded. Returns the payload's bytes.
uint64_t zipccl_encode_rows(const ZipcclLiterals* literals, int32_t dtype, int32_t code, uint32_t mantissa, uint32_t block, void* out,
                            int32_t threads);
// Decodes a payload of `bytes` bytes, a rounded one if `rounded`, to the places of the literals, of `dtype`. Returns 0 or a FrameErrorCode;
// the literals are then undefined, all other words as before.
int32_t zipccl_decode_rows(const void* payload, uint64_t bytes, const ZipcclLiterals* literals, int32_t dtype, int32_t rounded,
                           uint32_t block, int32_t threads);
// Copies `count` rows of `row_bytes`: row sources[i] at `data` to row rows[i]. No row is both.
void zipccl_copy_rows(uint8_t* data, uint64_t row_bytes, const int32_t* rows, const int32_t* sources, uint64_t count, int32_t threads);
// Writes the factor from row sources[i] to row rows[i], of `width` words of `dtype` (1 to 3), to factors[i]; 0 where there is none.
void zipccl_row_factors(const uint8_t* words, int32_t dtype, uint64_t width, const int32_t* rows, const int32_t* sources, uint64_t count,
                        uint32_t* factors, int32_t threads);
// Predicts `count` rows of `width` words of `dtype` (1 to 3) from rows `sources` and `factors`, one behind the other to `out`.
void zipccl_predict_rows(const uint8_t* words, int32_t dtype, uint64_t width, const int32_t* sources, const uint32_t* factors,
                         uint64_t count, uint8_t* out, int32_t threads);

// --- cpu/rows/row_map.cpp
// Reads the map of a frame without scaled rows. Returns 0, or 1 where the map contradicts itself, its numbers or the rows in front.
int32_t zipccl_unpack_repeats(const ZipcclMap* m);

// --- cpu/rows/row_frame.cpp
// Writes the payload of the frame of the `numel` words from `begin` on to `out`, which has `room` bytes, those of an ordinary payload at
// least. Looks for repeats in rows that have not been seen. Returns the payload's bytes; 0 where a row frame is not worth while.
uint64_t zipccl_row_frame(ZipcclRowSegment* segment, uint64_t begin, uint64_t numel, uint8_t* out, uint64_t room, int32_t threads);

// --- cpu/lossy/rounded.cpp
// Rounds numel words of `dtype` (1 to 3) to `mantissa` bits, to `out`, which may be `words`.
void zipccl_round_words(const void* words, uint64_t numel, int32_t dtype, uint32_t mantissa, void* out, int32_t threads);
// Encodes `count` segments of `dtype` (1 to 3), rounded to `mantissa` bits; those of dtype 3 to exponent payloads. `untrimmed` gets the
// bytes of the exponent payload of each, which counts RAW blocks of the rounded payload as RAW.
void zipccl_encode_rounded(ZipcclSegment* segments, uint32_t count, int32_t dtype, uint32_t mantissa, uint32_t block, uint64_t* untrimmed,
                           int32_t threads);

// --- cpu/lossy/scaled.cpp
// Writes the scales of numel words of `dtype` (1 to 3), one for each group, and the codes of those groups whose scale is not zero; `codes`
// has room for those of all groups. Returns the number of groups with codes, or kGroupStays.
uint64_t zipccl_scaled_encode(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* scales,
                              uint8_t* codes, int32_t threads);
// Encodes as zipccl_scaled_encode does, and the codes (E4M3) to a payload with stage 2 in blocks of `block` codes; `payload` has room for its
// bound. Chunks of codes are encoded while they are in the cache. Returns the bytes of the payload; kGroupStays; or 0 where a group has no
// codes, so that those of later groups would have other places: all outputs are then undefined.
uint64_t zipccl_scaled_encode_staged(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint32_t block,
                                     uint8_t* scales, uint8_t* codes, uint8_t* payload, int32_t threads);
// Decodes to words or sums at `out`. Returns 0 or a FrameErrorCode.
int32_t zipccl_scaled_decode(const uint8_t* scales, const uint8_t* codes, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling,
                             uint8_t* out, int32_t into, int32_t threads);
// As zipccl_scaled_decode, of codes with stage 2: a payload of `bytes` bytes in blocks of `block` codes, E4M3.
int32_t zipccl_scaled_decode_staged(const uint8_t* scales, const uint8_t* payload, uint64_t bytes, uint32_t block, uint64_t numel,
                                    int32_t dtype, const ZipcclScaling* scaling, uint8_t* out, int32_t into, int32_t threads);
// Writes the decoded values of numel words of `dtype` to `out`, which may be `words`; groups that stay as they are, as they are.
void zipccl_scaled_project(const uint8_t* words, uint64_t numel, int32_t dtype, const ZipcclScaling* scaling, uint8_t* out,
                           int32_t threads);

// --- cpu/lossy/zfp.cpp
// Encodes numel words of `dtype` (1 to 3) with `rate` bits each (3 to 32) to `out`: 8 bytes for every 64 bits begun. Returns 1 if all words
// are finite; otherwise 0, and `out` is undefined.
int32_t zipccl_zfp_encode(const uint8_t* words, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t threads);
// Decodes codes, of which there are as many bytes as zipccl_zfp_encode writes, to words or sums at `out`.
void zipccl_zfp_decode(const uint8_t* codes, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t into, int32_t threads);
// The words that zipccl_zfp_decode gives for codes of `words`; of four words among which is a NaN or an infinity, these words. `out` may be
// `words`.
void zipccl_zfp_project(const uint8_t* words, uint64_t numel, int32_t dtype, uint32_t rate, uint8_t* out, int32_t threads);

// --- cpu/lossy/lowrank.cpp
// The product of n rows of `rank` floats at `p` with m columns, as words of `dtype` (1 to 3), to words or sums at `out`. `columns`: `rank`
// rows of `stride` floats, m up to a multiple of kZipcclTile.
void zipccl_multiply(const float* p, const float* columns, uint64_t stride, uint32_t rank, uint64_t n, uint64_t m, int32_t dtype,
                     uint8_t* out, int32_t into, int32_t threads);
// Makes the `rank` columns of n rows at `columns` orthonormal, in place; `room`: rank (n + 1) doubles.
void zipccl_orthonormalize(float* columns, uint64_t n, uint32_t rank, double* room);
}
