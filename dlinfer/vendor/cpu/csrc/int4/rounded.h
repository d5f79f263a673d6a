// Tiles of x rounded to 8 bits, four rows of the weight at a time: the processor multiplies groups of four unsigned bytes
// by four signed ones and adds them up exactly (VNNI). For groups of such sizes, where the user allows it.
//
// x is rounded by rows and strips: a strip of a row has a scale, its largest absolute value / 127. With q of the weight,
// 0 to 15, and r of x, a strip's part of a sum is `(sum(q r) - zero sum(r)) * scale of the weight * scale of x`. The
// bracket is whole and below 2^24.
//
// Roofline: two registers of sums for a row of x take two multiplications for 8 weights a lane, twice what pairs of
// bfloat16 give. Widening four rows of a block costs what 3 rows of x do. A single row of x takes 20 instructions for four
// rows of a block, 256 bytes, where pairs take 48.
#pragma once

#include "int4/layer.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DLINFER_HAS_INT4_ROUNDED 1

namespace dlinfer::int4 {

// Four registers of words, one of each row, become four others. Lane 4 L + j of register t has byte j of word 4 L + t
// of all four rows: nibbles 2 j and 2 j + 1 of the word. "Nibble" 2 t + h below is the lower or upper half of register t.
struct RoundedTiles {
  using Sum = __m512i;
  using X = uint32_t;  // four numbers of 8 bits
  static constexpr bool kRounds = true;
  static constexpr int kRowsOfX = 4;
  static constexpr int64_t kFewRows = 2 * kMostRows;
  static constexpr int64_t kWideStripRows = kStripRows;
  static constexpr float kWithoutZeros = -8;

  // As FloatTiles has it. Each word of x has the numbers of four rows of the weight, or zeros behind the strip's end.
  template <Numbers kNumbers, int kRows, int kTileNibbles>
  static void run(const Strip& strip, const uint32_t* x, int first, Next& next, const Finish& to) {
    static_assert(kNumbers == Numbers::kWhole);
    with_first<kTileNibbles>(first, [&](auto at) { run_from<kRows, kTileNibbles, at()>(strip, x, next, to); });
  }

  // Two nibbles of a strip, one register after the other.
  template <Numbers kNumbers>
  static void widen(const Strip& strip, int first, Floats* panel) {
    static_assert(kNumbers == Numbers::kWhole);
    constexpr decltype(&widen_word<0>) kWords[] = {widen_word<0>, widen_word<1>, widen_word<2>, widen_word<3>};
    kWords[first / 2](strip, panel);
  }

  static Sum dot(Sum sum, Floats numbers, uint32_t x) {
    sum = _mm512_dpbusd_epi32(sum, (__m512i)numbers, _mm512_set1_epi32(int(x)));
#if !defined(DLINFER_MODEL)
    asm("" : "+v"(sum));  // or GCC 12 keeps sums in more registers than there are
#endif
    return sum;
  }

  // sums[i * kRows + m]: of nibble first + i, whole numbers.
  template <int kRows>
  static void finish(const Finish& to, const Sum* sums, int first) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Floats sum_of_x = all_lanes(to.sums_of_x[m * to.sums_stride]);
      const Floats scale = all_lanes(to.scales_of_x[m * to.sums_stride]);
      Floats* const kept = to.kept + m * to.kept_stride + first;
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Floats whole = (Floats)_mm512_cvtepi32_ps(sums[i * kRows + m]);
        const Floats exact = multiply_add(whole, to.less[first + i], sum_of_x);
        kept[i] = multiply_add(kept[i], exact, to.scales[first + i] * scale);
      }
    }
  }

  // Columns of a block in the order of sums.
  static void by_nibble(const float* columns, Floats* nibbles) {
    const __m512i lower = _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 16, 20, 17, 21, 24, 28, 25, 29);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(2));
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const auto eight = [&](int lane) { return _mm256_loadu_ps(columns + 8 * t + 2 * kLanes * lane); };
      const __m512 a = _mm512_insertf32x8(_mm512_castps256_ps512(eight(0)), eight(1), 1);
      const __m512 b = _mm512_insertf32x8(_mm512_castps256_ps512(eight(2)), eight(3), 1);
      nibbles[2 * t] = (Floats)_mm512_permutex2var_ps(a, lower, b);
      nibbles[2 * t + 1] = (Floats)_mm512_permutex2var_ps(a, upper, b);
    }
  }

  // And back.
  static void by_column(const Floats* nibbles, float* columns) {
    const __m512i first = _mm512_setr_epi32(0, 2, 16, 18, 1, 3, 17, 19, 4, 6, 20, 22, 5, 7, 21, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const __m512 lower = (__m512)nibbles[2 * t], upper = (__m512)nibbles[2 * t + 1];
      const auto put = [&](int lane, __m512i places) {
        const __m512 eights = _mm512_permutex2var_ps(lower, places, upper);
        float* const to = columns + 8 * t + 2 * kLanes * lane;
        _mm256_storeu_ps(to, _mm512_castps512_ps256(eights));
        _mm256_storeu_ps(to + 2 * kLanes, _mm512_extractf32x8_ps(eights, 1));
      };
      put(0, first);
      put(2, second);
    }
  }

  // -zero by nibble.
  static void less(Words zeros, Floats* nibbles) {
    const __m512i lower = _mm512_set4_epi32(24, 16, 8, 0), upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
    const __m512i words = (__m512i)zeros;
    const __m512i each[4] = {_mm512_shuffle_epi32(words, _MM_PERM_AAAA), _mm512_shuffle_epi32(words, _MM_PERM_BBBB),
                             _mm512_shuffle_epi32(words, _MM_PERM_CCCC), _mm512_shuffle_epi32(words, _MM_PERM_DDDD)};
#pragma GCC unroll 8
    for (int i = 0; i < kNibbles; ++i) {
      const __m512i bits = _mm512_srlv_epi32(each[i / 2], i % 2 ? upper : lower);
      nibbles[i] = -(Floats)_mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(15)));
    }
  }

 private:
  // A byte has two nibbles, 16 upper + lower. Summed are the products of bytes, and those of 16 upper.
  template <int kRows, int kTileNibbles, int kFirst>
  static void run_from(const Strip& strip, const uint32_t* x, Next& next, const Finish& to) {
    constexpr int kWords = kTileNibbles / 2, kTurns = kNibbles / kTileNibbles;
    const __m512i upper_half = _mm512_set1_epi8(char(0xf0));
    __m512i sums[kWords][2][kRows]{};
    const auto add = [&](__m512i a, __m512i b, __m512i c, __m512i d) __attribute__((always_inline)) {
      const __m512i bytes[4] = {four_rows<kFirst / 2>(a, b, c, d), four_rows<(kFirst / 2 + 1) % 4>(a, b, c, d),
                                four_rows<(kFirst / 2 + 2) % 4>(a, b, c, d), four_rows<(kFirst / 2 + 3) % 4>(a, b, c, d)};
#pragma GCC unroll 4
      for (int t = 0; t < kWords; ++t) {
        const __m512i upper = _mm512_and_si512(bytes[t], upper_half);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          sums[t][0][m] = dot(sums[t][0][m], (Floats)bytes[t], x[m]);
          sums[t][1][m] = dot(sums[t][1][m], (Floats)upper, x[m]);
        }
      }
      x += kRows;
    };
    const uint32_t* row = strip.words;
    int64_t k = 0;
    if (strip.count >= kLanes) {
      for (; k + 4 <= strip.depth; k += 4, row += 4 * strip.stride) {
#pragma GCC unroll 4
        for (int i = 0; i < 4 / kTurns; ++i) next.fetch();
        const auto at = [&](int64_t i) { return (__m512i)load_as<Words>(row + i * strip.stride); };
        add(at(0), at(1), at(2), at(3));
      }
    }
    for (; k < strip.depth; k += 4, row += 4 * strip.stride) {
      const auto at = [&](int64_t i) { return words_at(strip, row, k, i); };
      add(at(0), at(1), at(2), at(3));
    }
#pragma GCC unroll 4
    for (int t = 0; t < kWords; ++t) {
      Sum nibbles[2 * kRows];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        nibbles[m] = _mm512_sub_epi32(sums[t][0][m], sums[t][1][m]);
        nibbles[kRows + m] = _mm512_srai_epi32(sums[t][1][m], 4);
      }
      finish<kRows>(to, nibbles, kFirst + 2 * t);
    }
  }

  // Words of row k + i, zeros behind the strip's end. row: of row k.
  static __m512i words_at(const Strip& strip, const uint32_t* row, int64_t k, int64_t i) {
    return k + i < strip.depth ? (__m512i)load_words(row + i * strip.stride, strip.count) : __m512i{};
  }

  template <int kWord>
  static void widen_word(const Strip& strip, Floats* panel) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const uint32_t* row = strip.words;
    for (int64_t k = 0; k < strip.depth; k += 4, row += 4 * strip.stride, panel += 2) {
      const auto at = [&](int64_t i) { return words_at(strip, row, k, i); };
      const __m512i bytes = four_rows<kWord>(at(0), at(1), at(2), at(3));
      panel[0] = (Floats)_mm512_and_si512(bytes, nibble);
      panel[1] = (Floats)_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
    }
  }

  // Register kWord of the four.
  template <int kWord>
  static __m512i four_rows(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i first = pairs<kWord>(a, b), second = pairs<kWord>(c, d);
    return kWord % 2 ? _mm512_unpackhi_epi16(first, second) : _mm512_unpacklo_epi16(first, second);
  }

  template <int kWord>
  static __m512i pairs(__m512i a, __m512i b) {
    return kWord < 2 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  }
};

// Rows of x rounded, `rows` of them side by side for each four rows of the weight; and the sum and scale of each row in
// each strip. Strips begin at columns that four divides.
class RoundedInputs {
 public:
  RoundedInputs(const Layer& layer, int64_t count)
      : count(count),
        strips(layer.strips()),
        words_((layer.in + 3) / 4),
        numbers_(count * words_ * int64_t(sizeof(uint32_t))),
        sums_(count * strips * int64_t(sizeof(float))),
        scales_(count * strips * int64_t(sizeof(float))) {
    const int64_t passes = (count + kMostRows - 1) / kMostRows;
    rows = (count + passes - 1) / passes;
  }

  int64_t rows_at(int64_t first) const { return std::min(rows, count - first); }
  const uint32_t* at(int64_t first, int64_t column) const {
    return numbers_.as<uint32_t>() + first * words_ + column / 4 * rows_at(first);
  }
  const float* sums(int64_t row, int64_t strip) const { return sums_.as<float>() + row * strips + strip; }
  const float* scales(int64_t row, int64_t strip) const { return scales_.as<float>() + row * strips + strip; }

  template <class T>
  void pack(const T* data, int64_t stride, const Layer& layer) {
    parallel_for(0, count, kRowsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = row / rows * rows, side = rows_at(first);
        uint32_t* const words = numbers_.as<uint32_t>() + first * words_ + (row - first);
        for (int64_t strip = 0; strip < strips; ++strip) {
          const Span span = span_of(layer, strip);
          const int64_t at = row * strips + strip;
          round(data + row * stride + span.begin, span.depth, words + span.begin / 4 * side, side,
                sums_.as<float>() + at, scales_.as<float>() + at);
        }
      }
    });
  }

  // Rounds numbers: four of them to a word, and the next word `side` words on.
  template <class T>
  static void round(const T* from, int64_t depth, uint32_t* words, int64_t side, float* sum, float* scale) {
    // The bits of absolute values are in their order, and NaN comes last.
    __m512i most{};
    for_registers(from, depth, [&](Floats numbers, int64_t, int64_t) {
      most = _mm512_max_epu32(most, _mm512_and_si512((__m512i)numbers, _mm512_set1_epi32(0x7fffffff)));
    });
    const uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_nothing = largest < kLeast;
    const Floats by = all_lanes(is_nothing ? 0.0f : 127.0f / largest);
    __m512i total{};
    for_registers(from, depth, [&](Floats numbers, int64_t at, int64_t some) {
      const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(numbers * by)));
      total = _mm512_add_epi32(total, _mm512_cvtepi8_epi32(bytes));
      uint32_t four[4];
      std::memcpy(four, &bytes, sizeof four);
      for (int64_t i = 0; 4 * i < some; ++i) words[(at / 4 + i) * side] = four[i];
    });
    *sum = float(_mm512_reduce_add_epi32(total));
    *scale = is_nothing ? 0.0f : largest / 127.0f;
  }

  int64_t count, strips, rows;

 private:
  static constexpr int64_t kRowsPerThread = 8;  // fewer are rounded before another thread has begun
  static constexpr float kLeast = 1e-35f;       // below it a number is none: 127 / it is infinite

  template <class T, class Each>
  static void for_registers(const T* from, int64_t depth, const Each& each) {
    int64_t at = 0;
    for (; at + kLanes <= depth; at += kLanes) each(widen(from + at), at, int64_t(kLanes));
    if (at < depth) each(widen_part(from + at, depth - at), at, depth - at);
  }

  int64_t words_;
  Scratch numbers_, sums_, scales_;
};

}  // namespace dlinfer::int4

#endif
