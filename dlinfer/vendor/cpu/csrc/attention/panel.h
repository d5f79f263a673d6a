// Some rows of queries against a tile of keys and values: the arithmetic of prefill attention.
//
// Both products ask memory, step by step, for the tile that comes next.
//
// Everything stands transposed, a row of queries a lane: S^T = K Q^T and O^T = V^T P^T. So the softmax never crosses
// lanes, sums of O are rescaled where they lie, and P leaves the softmax as the product with V wants it. Keys and
// values are the operands that are broadcast, so keys may lie as they do in the cache. Operands are "words" of
// 32 bits: a float32, or two neighbours in bfloat16, which its instruction multiplies at once (kPaired).
//
// A row's sums are taken in the order of its keys, tile by tile, whatever rows stand beside it. Keys that
// only other rows of its panel see add exact zeros, which make no difference to its bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/exponential.h"

namespace dlinfer::prefill {

// kVectors registers of rows make a panel; its block of kColumns keys, or numbers of a value, is summed in registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4, kColumns = 6;  // 24 of 32 registers
#elif defined(__AVX__)
constexpr int kVectors = 2, kColumns = 6;  // 12 of 16
#else
constexpr int kVectors = 2, kColumns = 4;  // 8 of 16; a product needs one, too
#endif
constexpr int64_t kPanelRows = kVectors * kLanes;
constexpr int64_t kTileKeys = 96;  // of K and V that are copied together; tiles begin at multiples of it
constexpr int64_t kTiledKeys = 32;  // that the tiles of AMX take at once (tiled_panel.h)
static_assert(kTileKeys % (2 * kColumns) == 0 && kColumns % 2 == 0 && kTileKeys % kTiledKeys == 0);

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLog2e = 0x1.715476p0f;

using Signed = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline void store(float* to, Floats lanes) { std::memcpy(to, &lanes, sizeof lanes); }

template <bool kPaired>
inline Floats add_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512BF16__)
  if constexpr (kPaired) return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add(sum, a, b);
}

#if defined(__AVX512BF16__)
// Words of two neighbours in bfloat16, where what is below its normal numbers is zero.
inline Floats paired(Floats first, Floats second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  return (Floats)_mm512_permutexvar_epi16(order, (__m512i)both);
}
#endif

// The change of a score before the softmax.
struct Shape {
  float scale, softcap;
  bool slopes;  // whether rows have some
  int32_t lowest, highest;  // visible are keys at lowest <= key - position <= highest, unless a sequence tells them
  // Whether the softmax takes raw scores, with the scale as a factor of its exponent.
  bool plain() const { return softcap <= 0 && !slopes && scale > 0; }
};

// Of each row of a panel.
struct RowState {
  float largest[kPanelRows];       // score so far, times log2(e)
  float tile_largest[kPanelRows];  // score of this tile, as it stands there
  float sums[kPanelRows];          // of exponentials
  float rescale[kPanelRows];       // of what was summed before the last tile
  int32_t begins[kPanelRows], ends[kPanelRows];  // of the keys that it sees
  int32_t positions[kPanelRows];
  float slopes[kPanelRows];
};

// The keys [begin, end) that a query sees.
struct Keys {
  int32_t begin, end;
};

// Keys: some rows see some of [begin, end), and all rows see [all_begin, all_end). For a panel's arithmetic they are
// counted from a tile's first.
struct Seen {
  int64_t begin, end, all_begin, all_end;
  int64_t first(int64_t block) const { return begin / block * block; }
  int64_t first_tile() const { return begin / kTileKeys * kTileKeys; }
};

// kRows registers of rows. Scores are computed of kBlock keys, or fewer, at once, and weights of kWeighed.
template <bool kPaired, int kRows, int64_t kBlock = kColumns, int64_t kWeighed = kPaired ? 2 : 1>
struct Panel {
  static constexpr int64_t kWidth = kRows * kLanes;
  static constexpr int64_t kWord = kPaired ? 2 : 1;  // keys, or numbers of a key, in a word

  // Where weights end: those of keys that no row sees are zeros.
  static int64_t end(const Seen& seen) { return (seen.end + kWeighed - 1) / kWeighed * kWeighed; }

  // scores[key, row] = key . query, settled, and each row's largest; keys: [keys, words], queries: [words, rows].
  template <class Ahead>
  static void multiply_keys(const Shape& shape, const float* keys, const float* queries, int64_t words,
                            const Seen& seen, int64_t tile, Ahead& ahead, RowState& rows, float* scores) {
    std::fill_n(rows.tile_largest, kWidth, kNone);
    for (int64_t key = seen.first(kColumns); key < seen.end; key += kColumns) {
      ahead.step();
      Floats sums[kColumns][kRows]{};
      add_products<kColumns>(keys + key * words, words, 1, queries, words, sums);
      float* const to = scores + key * kWidth;
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) store(to + c * kWidth + r * kLanes, sums[c][r]);
      }
      if (!shape.plain() || key < seen.all_begin || key + kColumns > seen.all_end) {
        settle(shape, key, kColumns, tile, rows, to);
        continue;
      }
      // While scores are in registers, and where the processor has multiplications to do meanwhile.
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Floats largest = load_as<Floats>(rows.tile_largest + r * kLanes);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) largest = larger(sums[c][r], largest);  // NaN is none
        store(rows.tile_largest + r * kLanes, largest);
      }
    }
  }

  // Makes weights of settled scores, in place: [keys / kWord, rows] words, counted from the same key.
  static void softmax(const Shape& shape, const Seen& seen, RowState& rows, float* scores) {
    const int64_t first = seen.first(kBlock), last = end(seen);
    const Floats factor = all_lanes(shape.plain() ? shape.scale * kLog2e : kLog2e);
    Floats base[kRows], sums[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Floats before = load_as<Floats>(rows.largest + r * kLanes);
      const Floats now = larger(load_as<Floats>(rows.tile_largest + r * kLanes) * factor, before);
      base[r] = now == all_lanes(kNone) ? Floats{} : now;
      const Floats rescale = exp2_of_negative(before - base[r]);
      store(rows.largest + r * kLanes, now);
      store(rows.rescale + r * kLanes, rescale);
      sums[r] = load_as<Floats>(rows.sums + r * kLanes) * rescale;
    }
    const auto weigh = [&](int64_t key, int r) __attribute__((always_inline)) {
      const Floats score = load_as<Floats>(scores + key * kWidth + r * kLanes);
      const Floats power = multiply_add(-base[r], score, factor);
#if defined(__AVX512BF16__)
      if constexpr (kPaired) return rough_exp2_of_negative(power);
#endif
      return exp2_of_negative(power);
    };
    for (int64_t key = first; key < last; key += kWord) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = weigh(key, r);
        float* to = scores + key / kWord * kWidth + r * kLanes;  // not behind what is read
#if defined(__AVX512BF16__)
        if constexpr (kPaired) {
          const Floats second = weigh(key + 1, r);
          sums[r] += weight + second;
          store(to, paired(weight, second));
          continue;
        }
#endif
        sums[r] += weight;
        store(to, weight);
      }
    }
    for (int r = 0; r < kRows; ++r) store(rows.sums + r * kLanes, sums[r]);
  }

  // out[number, row] = out * rescale + weights . values; values: [keys / kWord, count] words, count is even.
  template <class Ahead>
  static void multiply_values(const float* values, int64_t count, const float* weights, const Seen& seen,
                              const RowState& rows, Ahead& ahead, float* out) {
    const int64_t first = seen.first(kBlock) / kWord, words = end(seen) / kWord - first;
    values += first * count, weights += first * kWidth;
    int64_t at = 0;
    for (; at + kColumns <= count; at += kColumns) {
      ahead.step();
      add_values<kColumns>(values + at, count, weights, words, rows, out + at * kWidth);
    }
    for (; at + 4 <= count; at += 4) add_values<4>(values + at, count, weights, words, rows, out + at * kWidth);
    if (at < count) add_values<2>(values + at, count, weights, words, rows, out + at * kWidth);
  }

 protected:
  // Scales and masks the scores of a block of keys in memory, and finds each row's maximum.
  static void take_scores(const Shape& shape, int64_t key, const Seen& seen, int64_t tile, RowState& rows,
                          float* scores) {
    scores += key * kWidth;
    if (!shape.plain() || key < seen.all_begin || key + kBlock > seen.all_end) {
      return settle(shape, key, kBlock, tile, rows, scores);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      Floats largest = load_as<Floats>(rows.tile_largest + r * kLanes);
      for (int64_t c = 0; c < kBlock; ++c) {
        largest = larger(load_as<Floats>(scores + c * kWidth + r * kLanes), largest);  // NaN is none
      }
      store(rows.tile_largest + r * kLanes, largest);
    }
  }

 private:
  // sums[c][r] += left[c] . right[r] over `words`; word i of left[c] lies at left + c * between + i * step.
  template <int kCount>
  static inline __attribute__((always_inline)) void add_products(const float* left, int64_t between, int64_t step,
                                                                 const float* right, int64_t words,
                                                                 Floats (&sums)[kCount][kRows]) {
    for (int64_t i = 0; i < words; ++i, left += step, right += kWidth) {
      Floats lanes[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) lanes[r] = load_as<Floats>(right + r * kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kCount; ++c) {
        const Floats one = all_lanes(left[c * between]);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) sums[c][r] = add_product<kPaired>(sums[c][r], lanes[r], one);
      }
    }
  }

  template <int kCount>
  static void add_values(const float* values, int64_t count, const float* weights, int64_t words, const RowState& rows,
                         float* out) {
    Floats sums[kCount][kRows];
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[c][r] = load_as<Floats>(out + c * kWidth + r * kLanes) * load_as<Floats>(rows.rescale + r * kLanes);
      }
    }
    add_products<kCount>(values, 1, count, weights, words, sums);
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) store(out + c * kWidth + r * kLanes, sums[c][r]);
    }
  }

  // Of `count` keys: what the shape makes of scores, and -inf for keys that a row does not see.
  static void settle(const Shape& shape, int64_t key, int64_t count, int64_t tile, RowState& rows, float* scores) {
    const Floats scale = all_lanes(shape.softcap > 0 ? shape.scale / shape.softcap : shape.scale);
    for (int32_t place = int32_t(tile + key); place < int32_t(tile + key + count); ++place, scores += kWidth) {
      for (int r = 0; r < kRows; ++r) {
        Floats score = load_as<Floats>(scores + r * kLanes);
        if (!shape.plain()) score *= scale;
        if (shape.softcap > 0) score = tanh_of(score) * all_lanes(shape.softcap);
        if (shape.slopes) {
          const Signed apart = place - load_as<Signed>(rows.positions + r * kLanes);
          const Signed distance = apart < 0 ? -apart : apart;
          score -= load_as<Floats>(rows.slopes + r * kLanes) * __builtin_convertvector(distance, Floats);
        }
        const Signed begins = load_as<Signed>(rows.begins + r * kLanes);
        const Signed hidden = (begins > place) | (load_as<Signed>(rows.ends + r * kLanes) <= place);
        score = hidden ? all_lanes(kNone) : score;
        const Floats largest = load_as<Floats>(rows.tile_largest + r * kLanes);
        store(rows.tile_largest + r * kLanes, larger(score, largest));
        store(scores + r * kLanes, score);
      }
    }
  }
};

}  // namespace dlinfer::prefill
