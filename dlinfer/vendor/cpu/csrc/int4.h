// x @ w for a weight of 4 bits that lies as AWQ packs it, [in_features, out_features / 8] words of eight neighbours,
// which are widened in registers: no float copy of the weight is made, not even of a part of it.
//
// A number is (q - zero) * scale, with a zero and a scale for each column and each group of rows. Summed is x * (q - 8);
// the rest, (8 - zero) * sum of x, and the scale follow once a strip. The work is cut four times:
//   slice  blocks of columns whose float32 sums stay in the second-level cache
//   strip  rows of the weight within a group, so few that a block of them stays in the first-level cache
//   block  the columns of a register of words; while one is computed, the next is prefetched
//   tile   some nibbles of a block times a few rows of x, summed in registers
// Sums stand in the order of nibbles: kNibbles registers a block, lane j of register i for column 8 j + kNibbleOrder[i].
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "lanes.h"

namespace dlinfer::int4 {

constexpr int kNibbles = 8;
constexpr int kNibbleOrder[kNibbles] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr int kColumns = kLanes * kNibbles;  // of a block
constexpr int64_t kStripRows = 128;          // 8 KiB of a block with 16 lanes

// How many sums a tile keeps beside a few operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16
#endif
constexpr int kMostRows = kSums / 2;

constexpr int tile_nibbles(int rows) { return 8 * rows <= kSums ? 8 : 4 * rows <= kSums ? 4 : 2; }

inline Floats broadcast(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Floats)_mm256_set1_ps(value);
#else
  return value - Floats{};  // which keeps the sign of a zero
#endif
}

// q - 8 of nibble i of each word.
inline Floats centred(Words words, int i) {
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return (Floats)_mm512_permutexvar_ps((__m512i)(words >> uint32_t(4 * i)), numbers);  // by the lowest four bits
#else
  using Ints = int32_t __attribute__((vector_size(sizeof(Words))));
  const Words at_the_top = (words ^ 0x88888888u) << uint32_t(28 - 4 * i);  // in two's complement
  return __builtin_convertvector((Ints)at_the_top >> 28, Floats);
#endif
}

// Words of a block, of which `count` exist.
inline Words load_words(const uint32_t* from, int64_t count) {
  return count >= kLanes ? load_as<Words>(from) : load_part<Words>(from, count);
}

// Rows of a block of the weight: `count` of its words exist, the next row begins `stride` words on.
struct Strip {
  const uint32_t* words;
  int64_t stride;
  int64_t count;
  int64_t depth;  // rows
};

// What is prefetched meanwhile: a line for each row, `stride` words apart.
struct Next {
  const uint32_t* line;
  int64_t stride;
};

// sums[i * kRows + m] = sum over the strip of x[m] * (q - 8) of nibble first + i, for m < kRows. x holds the kRows numbers
// of a row of the weight side by side.
template <int kRows, int kTileNibbles>
void tile(const Strip& strip, const float* x, int first, Next next, Floats* sums) {
  Floats kept[kTileNibbles * kRows]{};
  const auto add = [&](Words words) __attribute__((always_inline)) {
    if constexpr (kTileNibbles < kNibbles) words = words >> uint32_t(4 * first);
    Floats numbers[kTileNibbles];
#pragma GCC unroll 8
    for (int i = 0; i < kTileNibbles; ++i) numbers[i] = centred(words, i);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Floats input = broadcast(x[m]);
#pragma GCC unroll 8
      for (int i = 0; i < kTileNibbles; ++i) {
        kept[i * kRows + m] = multiply_add(kept[i * kRows + m], numbers[i], input);
      }
    }
    x += kRows;
  };
  const uint32_t* row = strip.words;
  if (strip.count >= kLanes) {
    for (int64_t k = 0; k < strip.depth; ++k, row += strip.stride) {
      __builtin_prefetch(next.line, 0, 2);  // not the first level
      next.line += next.stride;
      add(load_as<Words>(row));
    }
  } else {
    for (int64_t k = 0; k < strip.depth; ++k, row += strip.stride) add(load_part<Words>(row, strip.count));
  }
#pragma GCC unroll 24
  for (int i = 0; i < kTileNibbles * kRows; ++i) sums[i] = kept[i];
}

struct Tile {
  using Function = void (*)(const Strip&, const float*, int, Next, Floats*);
  int nibbles;
  Function run;
};

template <int... I>
constexpr std::array<Tile, sizeof...(I)> tiles_by_rows(std::integer_sequence<int, I...>) {
  return {{{tile_nibbles(I + 1), tile<I + 1, tile_nibbles(I + 1)>}...}};
}

constexpr auto kTilesByRows = tiles_by_rows(std::make_integer_sequence<int, kMostRows>());

// The lanes of a and b, end to end, that have an even or odd number.
template <int kOdd, int... J>
inline Floats every_other(Floats a, Floats b, std::integer_sequence<int, J...>) {
  return pick<(2 * J + kOdd)...>(a, b);
}

// Columns of a block in their order become registers in the order of nibbles.
inline void to_nibble_order(const float* columns, Floats* nibbles) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  Floats from[kNibbles], to[kNibbles];
#pragma GCC unroll 8
  for (int t = 0; t < kNibbles; ++t) from[t] = load_as<Floats>(columns + t * kLanes);
  // Each round splits sequences by the lowest bit that is left of a column's number.
#pragma GCC unroll 3
  for (int half = kNibbles / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int t = 0; t < kNibbles; t += 2) {
      const int place = t / (2 * half) * (2 * half) + t % (2 * half) / 2;
      to[place] = every_other<0>(from[t], from[t + 1], lanes);
      to[place + half] = every_other<1>(from[t], from[t + 1], lanes);
    }
#pragma GCC unroll 8
    for (int t = 0; t < kNibbles; ++t) from[t] = to[t];
  }
#pragma GCC unroll 8
  for (int i = 0; i < kNibbles; ++i) {
    const int column = kNibbleOrder[i];
    nibbles[i] = from[(column & 1) * 4 + (column & 2) + (column >> 2 & 1)];
  }
}

}  // namespace dlinfer::int4
