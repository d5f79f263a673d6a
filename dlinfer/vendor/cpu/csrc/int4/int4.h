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

#include "common/lanes.h"

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

// What four bits stand for: q - 8, or a float of one sign, two bits of exponent and one of mantissa (E2M1).
enum class Numbers { kWhole, kE2M1 };

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
  if constexpr (kNumbers == Numbers::kE2M1) {
    using Ints = int32_t __attribute__((vector_size(sizeof(Words))));
    const Words code = words >> uint32_t(4 * i), exponent = code >> 1u & 3u, mantissa = code & 1u;
    // Twice the magnitude is whole: the mantissa alone below the first exponent, else 2 or 3 shifted by it less one.
    const Words normal = ((mantissa | 2u) << exponent) >> 1u, is_normal = (Words)(exponent != 0u);
    const Ints twice = (Ints)((normal & is_normal) | (mantissa & ~is_normal));
    const Floats magnitude = __builtin_convertvector(twice, Floats) * 0.5f;
    return (Floats)((Words)magnitude | (code & 8u) << 28u);
  }
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
template <Numbers kNumbers, int kRows, int kTileNibbles>
void tile(const Strip& strip, const float* x, int first, Next next, Floats* sums) {
  Floats kept[kTileNibbles * kRows]{};
  const auto add = [&](Words words) __attribute__((always_inline)) {
    if constexpr (kTileNibbles < kNibbles) words = words >> uint32_t(4 * first);
    Floats numbers[kTileNibbles];
#pragma GCC unroll 8
    for (int i = 0; i < kTileNibbles; ++i) numbers[i] = centred<kNumbers>(words, i);
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

#if defined(__AVX512BF16__)
#define DLINFER_HAS_INT4_PAIRS 1

// The numbers of the lowest four bits of each half of a word, as bfloat16, which has them exactly.
template <Numbers kNumbers>
inline __m512bh centred_pairs(__m512i words) {
  static constexpr short kWhole[16] = {short(0xc100), short(0xc0e0), short(0xc0c0), short(0xc0a0), short(0xc080),
                                short(0xc040), short(0xc000), short(0xbf80), 0,             0x3f80,
                                0x4000,        0x4040,        0x4080,        0x40a0,        0x40c0,
                                0x40e0};
  static constexpr short kE2M1[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, short(0x8000),
                               short(0xbf00), short(0xbf80), short(0xbfc0), short(0xc000), short(0xc040),
                               short(0xc080), short(0xc0c0)};
  constexpr const short(&k)[16] = kNumbers == Numbers::kWhole ? kWhole : kE2M1;
  const __m512i numbers = _mm512_set_epi16(k[15], k[14], k[13], k[12], k[11], k[10], k[9], k[8], k[7], k[6], k[5],
                                           k[4], k[3], k[2], k[1], k[0], k[15], k[14], k[13], k[12], k[11], k[10],
                                           k[9], k[8], k[7], k[6], k[5], k[4], k[3], k[2], k[1], k[0]);
  return (__m512bh)_mm512_permutexvar_epi16(words, numbers);  // by the lowest five bits: each number stands twice
}

// Like tile, for x in bfloat16, of which each word of x has the numbers of two rows of the weight: the instruction
// multiplies and adds pairs. Where the strip ends in half a pair, the other half of x is zero.
template <Numbers kNumbers, int kRows, int kTileNibbles>
void tile_of_pairs(const Strip& strip, const uint32_t* x, int first, Next next, Floats* sums) {
  Floats kept[kTileNibbles * kRows]{};
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  const __m128i shift = _mm_cvtsi32_si128(4 * (first % 4));
  const bool upper = first >= 4;
  const auto add = [&](Words even_row, Words odd_row) __attribute__((always_inline)) {
    const __m512i a = (__m512i)even_row, b = (__m512i)odd_row;
    __m512bh numbers[kTileNibbles];
    // Nibbles 0 to 3 of both rows, then 4 to 7.
    if constexpr (kTileNibbles == kNibbles) {
      const __m512i low = _mm512_mask_blend_epi16(kOdd, a, _mm512_slli_epi32(b, 16));
      const __m512i high = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(a, 16), b);
      numbers[0] = centred_pairs<kNumbers>(low);
      numbers[1] = centred_pairs<kNumbers>(_mm512_srli_epi16(low, 4));
      numbers[2] = centred_pairs<kNumbers>(_mm512_srli_epi16(low, 8));
      numbers[3] = centred_pairs<kNumbers>(_mm512_srli_epi16(low, 12));
      numbers[4] = centred_pairs<kNumbers>(high);
      numbers[5] = centred_pairs<kNumbers>(_mm512_srli_epi16(high, 4));
      numbers[6] = centred_pairs<kNumbers>(_mm512_srli_epi16(high, 8));
      numbers[7] = centred_pairs<kNumbers>(_mm512_srli_epi16(high, 12));
    } else {
      const __m512i both = upper ? _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(a, 16), b)
                                 : _mm512_mask_blend_epi16(kOdd, a, _mm512_slli_epi32(b, 16));
      const __m512i from = _mm512_srl_epi16(both, shift);
      numbers[0] = centred_pairs<kNumbers>(from);
      numbers[1] = centred_pairs<kNumbers>(_mm512_srli_epi16(from, 4));
      if constexpr (kTileNibbles == 4) {
        numbers[2] = centred_pairs<kNumbers>(_mm512_srli_epi16(from, 8));
        numbers[3] = centred_pairs<kNumbers>(_mm512_srli_epi16(from, 12));
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const __m512bh input = (__m512bh)_mm512_set1_epi32(int(x[m]));
#pragma GCC unroll 8
      for (int i = 0; i < kTileNibbles; ++i) {
        kept[i * kRows + m] = (Floats)_mm512_dpbf16_ps((__m512)kept[i * kRows + m], numbers[i], input);
      }
    }
    x += kRows;
  };
  const uint32_t* row = strip.words;
  int64_t k = 0;
  if (strip.count >= kLanes) {
    for (; k + 2 <= strip.depth; k += 2, row += 2 * strip.stride) {
      __builtin_prefetch(next.line, 0, 2);
      __builtin_prefetch(next.line + next.stride, 0, 2);
      next.line += 2 * next.stride;
      add(load_as<Words>(row), load_as<Words>(row + strip.stride));
    }
  } else {
    for (; k + 2 <= strip.depth; k += 2, row += 2 * strip.stride) {
      add(load_words(row, strip.count), load_words(row + strip.stride, strip.count));
    }
  }
  if (k < strip.depth) add(load_words(row, strip.count), Words{});
#pragma GCC unroll 24
  for (int i = 0; i < kTileNibbles * kRows; ++i) sums[i] = kept[i];
}
#endif

struct Tile {
  int nibbles;
  void (*run)(const Strip&, const float*, int, Next, Floats*);
#if defined(DLINFER_HAS_INT4_PAIRS)
  void (*run_pairs)(const Strip&, const uint32_t*, int, Next, Floats*);
#endif
};

template <Numbers kNumbers, int kRows>
constexpr Tile tile_of() {
  constexpr int kTileNibbles = tile_nibbles(kRows);
#if defined(DLINFER_HAS_INT4_PAIRS)
  return {kTileNibbles, tile<kNumbers, kRows, kTileNibbles>, tile_of_pairs<kNumbers, kRows, kTileNibbles>};
#else
  return {kTileNibbles, tile<kNumbers, kRows, kTileNibbles>};
#endif
}

template <Numbers kNumbers, int... I>
constexpr std::array<Tile, sizeof...(I)> tiles_by_rows(std::integer_sequence<int, I...>) {
  return {{tile_of<kNumbers, I + 1>()...}};
}

using Tiles = std::array<Tile, kMostRows>;
template <Numbers kNumbers>
constexpr Tiles kTilesByRows = tiles_by_rows<kNumbers>(std::make_integer_sequence<int, kMostRows>());

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
