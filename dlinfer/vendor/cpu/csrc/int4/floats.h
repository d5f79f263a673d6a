// Tiles of x in float32: lanes are words, and a register of numbers is one nibble of each.
//
// Roofline: a line of words, 8 * kLanes weights, takes a shift, a table look-up (of other instruction sets: three or
// four instructions) and a multiplication a nibble. With AVX-512 that is some 16 cycles of a Zen 4 for a single row of
// x, and a thread's share of the memory takes 18. With more rows it is bound by multiplications.
#pragma once

#include "common/widen.h"
#include "int4/int4.h"

namespace dlinfer::int4 {

// The numbers that nibble i of each word stands for.
template <Numbers kNumbers = Numbers::kWhole>
inline Floats centred(Words words, int i) {
#if defined(__AVX512F__)
  const __m512 whole = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512 e2m1 =
      _mm512_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6);
  const __m512 numbers = kNumbers == Numbers::kWhole ? whole : e2m1;
  return (Floats)_mm512_permutexvar_ps((__m512i)(words >> uint32_t(4 * i)), numbers);  // by the lowest four bits
#else
  using Ints = int32_t __attribute__((vector_size(sizeof(Words))));
  if constexpr (kNumbers == Numbers::kE2M1) {
    const Words code = words >> uint32_t(4 * i), exponent = code >> 1u & 3u, mantissa = code & 1u;
    // Twice the magnitude is whole: the mantissa alone below the first exponent, else 2 or 3 shifted by it less one.
    const Words normal = ((mantissa | 2u) << exponent) >> 1u, is_normal = (Words)(exponent != 0u);
    const Ints twice = (Ints)((normal & is_normal) | (mantissa & ~is_normal));
    const Floats magnitude = __builtin_convertvector(twice, Floats) * 0.5f;
    return (Floats)((Words)magnitude | (code & 8u) << 28u);
  }
  const Words at_the_top = (words ^ 0x88888888u) << uint32_t(28 - 4 * i);  // in two's complement
  return __builtin_convertvector((Ints)at_the_top >> 28, Floats);
#endif
}

struct FloatTiles {
  using Sum = Floats;
  using X = float;
  static constexpr bool kRounds = false;
  static constexpr float kWithoutZeros = 0;  // what a weight without zero points has in `less`
  static constexpr int kRowsOfX = 1;  // rows of the weight for which there is one X
  static constexpr int64_t kFewRows = 2 * kMostRows;  // of x, for which the weight is widened anew by each tile
  static constexpr int64_t kWideStripRows = kStripRows;

  // Adds, for m < kRows, the sum over the strip of x[m] * (q - 8) to where it belongs, for the nibbles from `first` on.
  // x holds the kRows numbers of a row of the weight side by side.
  template <Numbers kNumbers, int kRows, int kTileNibbles>
  static void run(const Strip& strip, const float* x, int first, Next& next, const Finish& to) {
    constexpr int kTurns = kNibbles / kTileNibbles;  // tiles that fetch what comes next
    Floats kept[kTileNibbles * kRows]{};
    const auto add = [&](Words words) __attribute__((always_inline)) {
      if constexpr (kTileNibbles < kNibbles) words = words >> uint32_t(4 * first);
      Floats numbers[kTileNibbles];
#pragma GCC unroll 8
      for (int i = 0; i < kTileNibbles; ++i) numbers[i] = centred<kNumbers>(words, i);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Floats input = all_lanes(x[m]);
#pragma GCC unroll 8
        for (int i = 0; i < kTileNibbles; ++i) {
          kept[i * kRows + m] = multiply_add(kept[i * kRows + m], numbers[i], input);
        }
      }
      x += kRows;
    };
    const uint32_t* row = strip.words;
    int64_t k = 0;
    if (strip.count >= kLanes) {
      for (; k + kTurns <= strip.depth; k += kTurns) {
        next.fetch();
#pragma GCC unroll 4
        for (int i = 0; i < kTurns; ++i, row += strip.stride) add(load_as<Words>(row));
      }
    }
    for (; k < strip.depth; ++k, row += strip.stride) add(load_words(row, strip.count));
    to.add<kRows, kTileNibbles>(kept, first);
  }

  // Two nibbles of a strip, one register after the other.
  template <Numbers kNumbers>
  static void widen(const Strip& strip, int first, Floats* panel) {
    const uint32_t* row = strip.words;
    for (int64_t k = 0; k < strip.depth; ++k, row += strip.stride, panel += 2) {
      const Words words = load_words(row, strip.count) >> uint32_t(4 * first);
      panel[0] = centred<kNumbers>(words, 0);
      panel[1] = centred<kNumbers>(words, 1);
    }
  }

  static Floats dot(Floats sum, Floats numbers, float x) { return multiply_add(sum, numbers, all_lanes(x)); }

  // The lanes of a and b, end to end, that have an even or odd number.
  template <int kOdd, int... J>
  static Floats every_other(Floats a, Floats b, std::integer_sequence<int, J...>) {
    return pick<(2 * J + kOdd)...>(a, b);
  }

  // Nibble i of word j is of column 8 j + kOrder[i].
  static constexpr int kOrder[kNibbles] = {0, 2, 4, 6, 1, 3, 5, 7};

  // Columns of a block become a register a nibble.
  static void by_nibble(const float* columns, Floats* nibbles) {
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
      const int column = kOrder[i];
      nibbles[i] = from[(column & 1) * 4 + (column & 2) + (column >> 2 & 1)];
    }
  }

  // And back.
  static void by_column(const Floats* nibbles, float* columns) {
    for (int i = 0; i < kNibbles; ++i) {
      for (int j = 0; j < kLanes; ++j) columns[j * kNibbles + kOrder[i]] = nibbles[i][j];
    }
  }

  // 8 - zero by nibble.
  static void less(Words zeros, Floats* nibbles) {
#pragma GCC unroll 8
    for (int i = 0; i < kNibbles; ++i) nibbles[i] = -centred(zeros, i);
  }
};

}  // namespace dlinfer::int4
