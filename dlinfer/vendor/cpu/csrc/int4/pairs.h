// Tiles of x in bfloat16, two rows of the weight at a time: the processor multiplies and adds pairs.
//
// Roofline, on a Zen 4 of 3.7 GHz: two lines of words, 256 weights, take 2 interleavings, 6 shifts, 8 look-ups and 8
// multiplications for a single row of x: 13 cycles. A thread's share of the memory (two threads, 25 GB/s) takes 37
// cycles. So up to four rows are bound by memory; 8 rows take 64 cycles, a multiplication each.
#pragma once

#include "int4/int4.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define DLINFER_HAS_INT4_PAIRS 1

namespace dlinfer::int4 {

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

// The halves of words of two rows are interleaved, four words of each register in the order of memory. That leaves two
// registers: one with the first two words of each four, one with the others. A lane of theirs is half a word of both
// rows: its four nibbles are of columns 0, 2, 4, 6 or 1, 3, 5, 7 of the word. "Nibble" i below is nibble i % 4 of
// register i / 4, so that a register of sums has pairs of neighbouring columns, two words of each four.
struct PairTiles {
  using Sum = Floats;
  using X = uint32_t;
  static constexpr bool kRounds = false;
  static constexpr float kWithoutZeros = 0;  // what a weight without zero points has in `less`
  static constexpr int kRowsOfX = 2;
  static constexpr int64_t kFewRows = 6 * kMostRows;  // of x, for which the weight is widened anew by each tile
  // Rows of a strip where they are wide, each in another page: so few that the processor knows where those pages are.
  static constexpr int64_t kWideStripRows = kStripRows / 2;

  template <int kFirst>
  static __m512i interleaved(__m512i even_row, __m512i odd_row) {
    return kFirst < 4 ? _mm512_unpacklo_epi16(even_row, odd_row) : _mm512_unpackhi_epi16(even_row, odd_row);
  }

  // As FloatTiles has it. Each word of x has the numbers of two rows of the weight; where the strip ends in half a pair,
  // the other half of x is zero.
  template <Numbers kNumbers, int kRows, int kTileNibbles>
  static void run(const Strip& strip, const uint32_t* x, int first, Next& next, const Finish& to) {
    with_first<kTileNibbles>(first, [&](auto at) { run_from<kNumbers, kRows, kTileNibbles, at()>(strip, x, next, to); });
  }

  template <Numbers kNumbers, int kRows, int kTileNibbles, int kFirst>
  static void run_from(const Strip& strip, const uint32_t* x, Next& next, const Finish& to) {
    constexpr int kTurns = kNibbles / kTileNibbles, kUnit = std::max(kTurns, 2);
    Floats kept[kTileNibbles * kRows]{};
    const auto add = [&](Words even_row, Words odd_row) __attribute__((always_inline)) {
      const __m512i a = (__m512i)even_row, b = (__m512i)odd_row;
      const __m512i halves[2] = {interleaved<kFirst>(a, b), interleaved<kFirst + kTileNibbles - 1>(a, b)};
      __m512bh numbers[kTileNibbles];
#pragma GCC unroll 8
      for (int i = 0; i < kTileNibbles; ++i) {
        const int nibble = kFirst + i;
        numbers[i] = centred_pairs<kNumbers>(_mm512_srli_epi16(halves[nibble / 4 != kFirst / 4], 4 * (nibble % 4)));
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
      for (; k + kUnit <= strip.depth; k += kUnit) {
#pragma GCC unroll 2
        for (int i = 0; i < kUnit / kTurns; ++i) next.fetch();
#pragma GCC unroll 2
        for (int i = 0; i < kUnit; i += 2, row += 2 * strip.stride) {
          add(load_as<Words>(row), load_as<Words>(row + strip.stride));
        }
      }
    }
    for (; k + 2 <= strip.depth; k += 2, row += 2 * strip.stride) {
      add(load_words(row, strip.count), load_words(row + strip.stride, strip.count));
    }
    if (k < strip.depth) add(load_words(row, strip.count), Words{});
    to.add<kRows, kTileNibbles>(kept, kFirst);
  }

  // Two nibbles of a strip, one register after the other.
  template <Numbers kNumbers>
  static void widen(const Strip& strip, int first, Floats* panel) {
    const uint32_t* row = strip.words;
    const __m128i shift = _mm_cvtsi32_si128(4 * (first % 4));
    for (int64_t k = 0; k < strip.depth; k += 2, row += 2 * strip.stride, panel += 2) {
      const __m512i a = (__m512i)load_words(row, strip.count);
      const __m512i b = k + 1 < strip.depth ? (__m512i)load_words(row + strip.stride, strip.count) : __m512i{};
      const __m512i both = _mm512_srl_epi16(first < 4 ? interleaved<0>(a, b) : interleaved<4>(a, b), shift);
      panel[0] = (Floats)centred_pairs<kNumbers>(both);
      panel[1] = (Floats)centred_pairs<kNumbers>(_mm512_srli_epi16(both, 4));
    }
  }

  static Floats dot(Floats sum, Floats numbers, uint32_t x) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(int(x)));
  }

  // Columns of a block in the order of sums: pairs of columns move together. Of the four registers with the words of one
  // interleaved register, pair s of word e of each becomes pair e of register s.
  static void by_nibble(const float* columns, Floats* nibbles) {
    const __m512i lower = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), upper = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512d from[4];
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) from[t] = _mm512_loadu_pd(columns + (2 * t + half) * kLanes);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i places = i ? upper : lower;
        const __m512d a = _mm512_permutex2var_pd(from[0], places, from[1]);
        const __m512d b = _mm512_permutex2var_pd(from[2], places, from[3]);
        nibbles[half * 4 + 2 * i] = (Floats)_mm512_shuffle_f64x2(a, b, 0x44);
        nibbles[half * 4 + 2 * i + 1] = (Floats)_mm512_shuffle_f64x2(a, b, 0xee);
      }
    }
  }

  // And back.
  static void by_column(const Floats* nibbles, float* columns) {
    const __m512i lower = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), upper = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto at = [&](int i) { return (__m512d)nibbles[half * 4 + i]; };
      // The first two registers of each four, then the others.
      store_columns<0x44>(at, lower, upper, columns + half * kLanes);
      store_columns<0xee>(at, lower, upper, columns + (4 + half) * kLanes);
    }
  }

  template <int kPart, class At>
  static void store_columns(const At& at, __m512i lower, __m512i upper, float* columns) {
    const __m512d a = _mm512_shuffle_f64x2(at(0), at(1), kPart), b = _mm512_shuffle_f64x2(at(2), at(3), kPart);
    _mm512_storeu_pd(columns, _mm512_permutex2var_pd(a, lower, b));
    _mm512_storeu_pd(columns + 2 * kLanes, _mm512_permutex2var_pd(a, upper, b));
  }

  static void less(Words zeros, Floats* nibbles) {
    const __m512 numbers = _mm512_setr_ps(8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7);
    const __m512i none{}, words = (__m512i)zeros;
#pragma GCC unroll 8
    for (int i = 0; i < kNibbles; ++i) {
      const __m512i halves = i < 4 ? interleaved<0>(words, none) : interleaved<4>(words, none);
      nibbles[i] = (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32(halves, 4 * (i % 4)), numbers);
    }
  }
};

}  // namespace dlinfer::int4

#endif
