// A piece of keys and values against the query heads of their group: the arithmetic of decode attention.
//
// Keys stand transposed, a key a lane: S = Q K^T needs no sums over lanes, which for heads of 64 numbers would be most of
// the work, and the softmax finds the scores of a head side by side. Values lie as in the cache, a number a lane, and
// weights are broadcast. Operands are words of 32 bits, as in panel.h. Where bfloat16 goes two at a time, a word holds
// two neighbours of a key, or a number of two neighbouring values. Weights and their sum are rounded to bfloat16.
//
// Both products ask memory, step by step, for what is needed after them (Ahead).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "attention/ahead.h"
#include "attention/packing.h"

namespace dlinfer::decode {

using attention::Ahead;
using attention::kLine;
using prefill::add_product;
using prefill::kLog2e;
using prefill::kNone;
using prefill::kPairs;
using prefill::kWord;
using prefill::store;

constexpr int64_t kSpan = 256;                // keys of a piece
constexpr int64_t kTileKeys = 2 * kLanes;     // that are transposed together
constexpr int64_t kTileValues = 2 * kLanes;   // numbers of a value that are summed together
constexpr int kTileHeads = kAccumulators / 2;
static_assert(kSpan % kTileKeys == 0);

constexpr int64_t whole_tiles(int64_t count, int64_t tile) { return (count + tile - 1) / tile * tile; }

// [words, kTileKeys] of the next kLanes keys, null for zeros.
template <class T>
void transpose_keys(const T* const* keys, int64_t size, float* to) {
  constexpr int64_t kNumbers = kLanes * kWord<T>;  // of a square
  const bool all = keys[kLanes - 1] != nullptr;
  int64_t at = 0;
  for (; all && at + kNumbers <= size; at += kNumbers, to += kLanes * kTileKeys) {
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (kPairs<T>) {
        square[i] = load_as<Floats>(keys[i] + at);
      } else {
        square[i] = widen(keys[i] + at);
      }
    }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(to + i * kTileKeys, square[i]);
  }
  if (at == size) return;
  std::array<const T*, kLanes> rest;
  for (int i = 0; i < kLanes; ++i) rest[i] = keys[i] ? keys[i] + at : nullptr;
  prefill::pack_queries<T>(rest.data(), size - at, kTileKeys, to);
}

// Words of queries, [words, kHeads] for a tile of heads.
template <class T>
void pack_query(const T* query, int64_t size, int64_t heads, float* to) {
  for (int64_t at = 0, words = prefill::words_of<T>(size); at < words; at += kLanes) {
    const Floats part = prefill::words_at(query, at, size);
    const int64_t count = std::min<int64_t>(kLanes, words - at);
    for (int64_t i = 0; i < count; ++i) to[(at + i) * heads] = part[i];
  }
}

// scores[head * kSpan + key] = key . query for a tile of keys [words, kTileKeys] and queries [words, kHeads].
template <class T, int kHeads>
void multiply_keys(const float* keys, const float* queries, int64_t words, Ahead<T>& ahead, float* scores) {
  Floats sums[kHeads][2]{};
  Ahead<T> own = ahead;
  for (int64_t i = 0; i < words; ++i, keys += kTileKeys) {
    own.step();
    const Floats low = load_as<Floats>(keys), high = load_as<Floats>(keys + kLanes);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const Floats query = all_lanes(queries[i * kHeads + h]);
      sums[h][0] = add_product<kPairs<T>>(sums[h][0], low, query);
      sums[h][1] = add_product<kPairs<T>>(sums[h][1], high, query);
    }
  }
  ahead = own;
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    store(scores + h * kSpan, sums[h][0]);
    store(scores + h * kSpan + kLanes, sums[h][1]);
  }
}

// kTileValues numbers of a value, or of two neighbours as words; the numbers that a row lacks are zeros.
template <class T, bool kWhole>
inline __attribute__((always_inline)) void load_values(const T* const* rows, int64_t at, int64_t width,
                                                       Floats (&words)[2]) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    const __mmask32 some = kWhole ? ~__mmask32(0) : __mmask32((uint64_t(1) << width) - 1);
    const __m512i even = _mm512_maskz_loadu_epi16(some, rows[0] + at);
    const __m512i odd = _mm512_maskz_loadu_epi16(some, rows[1] + at);
    words[0] = (Floats)_mm512_unpacklo_epi16(even, odd);
    words[1] = (Floats)_mm512_unpackhi_epi16(even, odd);
    return;
  }
#endif
  const T* const row = rows[0] + at;
  words[0] = kWhole || width >= kLanes ? widen(row) : widen_part(row, width);
  words[1] = kWhole           ? widen(row + kLanes)
             : width > kLanes ? widen_part(row + kLanes, width - kLanes)
                              : Floats{};
}

// From the order that load_values leaves numbers in to that of memory.
template <class T>
inline void order_values([[maybe_unused]] Floats (&sums)[2]) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    const Floats low = pick<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(sums[0], sums[1]);
    sums[1] = pick<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(sums[0], sums[1]);
    sums[0] = low;
  }
#endif
}

// sums[head * row + 0 .. kTileValues) of weights . values; weights: [kHeads, kSpan] of words, rows: of whole words.
template <class T, int kHeads, bool kWhole>
void add_values(const T* const* rows, int64_t count, int64_t at, int64_t width, const float* weights, int64_t row,
                Ahead<T>& ahead, float* sums) {
  Floats totals[kHeads][2]{};
  Ahead<T> own = ahead;
  for (int64_t i = 0; i < count; i += kWord<T>, ++weights) {
    own.step();
    Floats words[2];
    load_values<T, kWhole>(rows + i, at, width, words);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      const Floats weight = all_lanes(weights[h * kSpan]);
      totals[h][0] = add_product<kPairs<T>>(totals[h][0], words[0], weight);
      totals[h][1] = add_product<kPairs<T>>(totals[h][1], words[1], weight);
    }
  }
  ahead = own;
#pragma GCC unroll 8
  for (int h = 0; h < kHeads; ++h) {
    order_values<T>(totals[h]);
    store(sums + h * row, totals[h][0]);
    store(sums + h * row + kLanes, totals[h][1]);
  }
}

template <class T>
struct HeadTiles {
  void (*keys)(const float*, const float*, int64_t, Ahead<T>&, float*);
  void (*values)(const T* const*, int64_t, int64_t, int64_t, const float*, int64_t, Ahead<T>&, float*);
  void (*part)(const T* const*, int64_t, int64_t, int64_t, const float*, int64_t, Ahead<T>&, float*);
};

template <class T, int... I>
constexpr std::array<HeadTiles<T>, sizeof...(I)> tiles_by_heads(std::integer_sequence<int, I...>) {
  return {{{multiply_keys<T, I + 1>, add_values<T, I + 1, true>, add_values<T, I + 1, false>}...}};
}

// By how many heads, less one.
template <class T>
constexpr auto kHeadTiles = tiles_by_heads<T>(std::make_integer_sequence<int, kTileHeads>());

template <int kHalf = kLanes / 2, int... J>
inline Floats fold(Floats v, std::integer_sequence<int, J...> lanes, bool add) {
  const Floats other = pick<(J ^ kHalf)...>(v, v);
  v = add ? v + other : larger(v, other);
  if constexpr (kHalf > 1) return fold<kHalf / 2>(v, lanes, add);
  return v;
}

// The change of a score before the softmax: its scale, then the cap (0 is none), then the slope by its distance.
struct Shape {
  float scale, softcap, slope;
  int64_t distance;  // of the first key from the query
  bool plain() const { return softcap <= 0 && slope == 0 && scale > 0; }
};

// Makes weights of a head's scores, in place and in words, and says their sum and the largest score times log2(e).
// scores has room for whole tiles.
template <class T>
inline void softmax(const Shape& shape, int64_t count, float* scores, float& largest, float& sum) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  const int64_t end = whole_tiles(count, kTileKeys);
  if (!shape.plain()) {
    const Floats scale = all_lanes(shape.softcap > 0 ? shape.scale / shape.softcap : shape.scale);
    Floats steps;
    for (int lane = 0; lane < kLanes; ++lane) steps[lane] = float(lane);
    for (int64_t i = 0; i < end; i += kLanes) {
      Floats score = load_as<Floats>(scores + i) * scale;
      if (shape.softcap > 0) score = tanh_of(score) * all_lanes(shape.softcap);
      if (shape.slope != 0) score -= all_lanes(shape.slope) * (all_lanes(float(shape.distance - i)) - steps);
      store(scores + i, score);
    }
  }
  std::fill(scores + count, scores + end, kNone);
  Floats most = all_lanes(kNone);
  for (int64_t i = 0; i < end; i += kLanes) most = larger(load_as<Floats>(scores + i), most);  // NaN is none
  const float factor = shape.plain() ? shape.scale * kLog2e : kLog2e;
  largest = fold(most, lanes, false)[0] * factor;
  const Floats base = all_lanes(largest == kNone ? 0.0f : largest), factors = all_lanes(factor);
  const auto weigh = [&](int64_t i) __attribute__((always_inline)) {
    return exp2_of_negative(multiply_add(-base, load_as<Floats>(scores + i), factors));
  };
  Floats sums[2]{};
  for (int64_t i = 0; i < end; i += kTileKeys) {
    const Floats first = weigh(i), second = weigh(i + kLanes);
#if defined(__AVX512BF16__)
    if constexpr (kPairs<T>) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
      store(scores + i / 2, (Floats)both);  // not behind what is read
      sums[0] += (Floats)((Words)both << 16);
      sums[1] += (Floats)((Words)both & 0xffff0000u);
      continue;
    }
#endif
    store(scores + i, first);
    store(scores + i + kLanes, second);
    sums[0] += first;
    sums[1] += second;
  }
  sum = fold(sums[0] + sums[1], lanes, true)[0];
}

}  // namespace dlinfer::decode
