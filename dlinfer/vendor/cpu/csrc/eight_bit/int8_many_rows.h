// x @ weight.T for many rows of x in int8, summed exactly in int32, with the instruction that multiplies groups of four
// unsigned bytes by four signed ones (VNNI). No weight is packed.
//
// The instruction wants one operand's groups side by side and may repeat one group of the other in all lanes. Side by
// side stands x, moved up by 128 to be unsigned: packed, a word holds four columns of a row, and a register the words of
// 16 rows. Four columns of a row of the weight are repeated as they lie in memory. That adds 128 times the sum of
// the weight's row, which is subtracted again. The sums of a tile lie 16 rows of x to a register; they are scaled,
// transposed and rounded on the way out.
//
// Roofline: a register of sums needs one instruction for 4 columns, and one of those starts in a cycle on Zen 4. A tile
// of 2 x 8 registers reads 10 operands for 16 of them.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DLINFER_HAS_INT8_MANY_ROWS 1

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "common/transpose.h"
#include "eight_bit/int8_scaled.h"
#include "threads/team.h"

namespace dlinfer::int8 {

constexpr int64_t kPanel = 16;           // rows of x in a register
constexpr int kPanels = 2;               // registers of a tile
constexpr int kTileRows = 8;             // rows of the weight in a tile
constexpr int64_t kGroupBytes = 256 << 10;  // of the weight: what meets a panel stays in the second-level cache
constexpr int64_t kMostGroupRows = 64;
constexpr int64_t kChunkBytes = 4 << 20;  // of x that are packed at a time, but for one tile
constexpr int64_t kPackedPerThread = 64 << 10;  // bytes of x: fewer are packed before another thread has begun

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Rows of x packed: panels of 16, in each a register of words for every four columns; zeros fill the last.
class PackedRows {
 public:
  PackedRows(const int8_t* x, int64_t count, int64_t columns)
      : words_((columns + 3) / 4), panels_((count + kPanel - 1) / kPanel), data_(new(std::align_val_t(64)) __m512i[panels_ * words_]) {
    const int64_t grain = std::max<int64_t>(kPackedPerThread / std::max<int64_t>(kPanel * columns, 1), 1);
    parallel_for(0, panels_, grain, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        pack(x + panel * kPanel * columns, std::min(kPanel, count - panel * kPanel), columns, data_.get() + panel * words_);
      }
    });
  }

  const __m512i* panel(int64_t number) const { return data_.get() + number * words_; }
  int64_t panels() const { return panels_; }
  int64_t words() const { return words_; }

 private:
  static void pack(const int8_t* rows, int64_t count, int64_t columns, __m512i* to) {
    for (int64_t column = 0; column < columns; column += 64) {
      const int64_t width = std::min<int64_t>(64, columns - column), words = (width + 3) / 4;
      const __mmask64 exist = ~0ull >> (64 - width);
      Floats turned[kPanel];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kPanel; ++r) {
        const __m512i bytes = r < count ? _mm512_maskz_loadu_epi8(exist, rows + r * columns + column) : __m512i{};
        turned[r] = (Floats)_mm512_xor_si512(bytes, _mm512_set1_epi8(char(0x80)));
      }
      transpose(turned);
      for (int64_t word = 0; word < words; ++word) to[column / 4 + word] = (__m512i)turned[word];
    }
  }

  struct Free {
    void operator()(__m512i* data) const { ::operator delete[](data, std::align_val_t(64)); }
  };
  int64_t words_, panels_;
  std::unique_ptr<__m512i[], Free> data_;
};

// Four columns of a row, or those that exist and zeros.
inline int32_t word_at(const int8_t* row, int64_t count = 4) {
  int32_t word = 0;
  std::memcpy(&word, row, count);
  return word;
}

// sums[p][r] = dot(weight row r, the rows of panel p), for kRows rows of the weight. `behind`: 128 times each row's sum.
template <int kCount, int kRows>
inline void panel_tile(const int8_t* weight, int64_t columns, const __m512i* x, int64_t x_next, const int32_t* behind,
                 __m512i* sums) {
  __m512i kept[kCount * kRows];
#pragma GCC unroll 16
  for (auto& one : kept) one = __m512i{};
  const auto add = [&](int64_t word, int64_t count) __attribute__((always_inline)) {
    __m512i rows[kCount];
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) rows[p] = _mm512_load_si512(x + p * x_next + word);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i repeated = _mm512_set1_epi32(word_at(weight + r * columns + 4 * word, count));
#pragma GCC unroll 4
      for (int p = 0; p < kCount; ++p) kept[r * kCount + p] = _mm512_dpbusd_epi32(kept[r * kCount + p], rows[p], repeated);
    }
  };
  const int64_t words = columns / 4;
  for (int64_t word = 0; word < words; ++word) add(word, 4);
  if (columns % 4) add(words, columns % 4);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
      sums[p * kMostGroupRows + r] = _mm512_sub_epi32(kept[r * kCount + p], _mm512_set1_epi32(behind[r]));
    }
  }
}

// 128 times the sum of a row.
inline int32_t too_much(const int8_t* row, int64_t columns) {
  __m512i sum{};
  for (int64_t column = 0; column < columns; column += 64) {
    const __mmask64 exist = ~0ull >> (64 - std::min<int64_t>(64, columns - column));
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(char(0x80)), _mm512_maskz_loadu_epi8(exist, row + column));
  }
  return _mm512_reduce_add_epi32(sum);
}

// Puts the sums of a panel and of `rows` rows of the weight from `first` on, for `count` rows of x from `c` on.
template <class T>
void put_sums(const __m512i* sums, int64_t first, int64_t rows, int64_t c, int64_t count, const Result<T>& to) {
  Floats by{};
  std::memcpy(&by, to.by + c, count * sizeof(float));
  by = with_plain_nan(by);
  for (int64_t r = 0; r < rows; r += kLanes) {
    const int64_t width = std::min<int64_t>(kLanes, rows - r);
    Floats turned[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) turned[i] = as_floats((Words)sums[r + std::min<int64_t>(i, width - 1)]) * by;
    transpose(turned);
    for (int64_t i = 0; i < count; ++i) put(turned[i], c + i, first + r, width, to);
  }
}

// The rows of the weight from `first` on, at most kMostGroupRows, with packed rows of x; the first is `c`.
template <class T>
void group(const int8_t* weight, int64_t first, int64_t rows, int64_t columns, const PackedRows& x, int64_t c,
           int64_t count, const Result<T>& to) {
  const int8_t* const lines = weight + first * columns;
  int32_t behind[kMostGroupRows];
  for (int64_t r = 0; r < rows; ++r) behind[r] = too_much(lines + r * columns, columns);
  __m512i sums[kPanels * kMostGroupRows];
  for (int64_t panel = 0; panel < x.panels(); panel += kPanels) {
    const int64_t some = std::min<int64_t>(kPanels, x.panels() - panel);
    for (int64_t r = 0; r < rows;) {
      const bool full = r + kTileRows <= rows;
      const auto run = [&](auto panels, auto tile_rows) {
        panel_tile<panels, tile_rows>(lines + r * columns, columns, x.panel(panel), x.words(), behind + r, sums + r);
      };
      const auto run_panels = [&](auto tile_rows) {
        some == kPanels ? run(Constant<kPanels>(), tile_rows) : run(Constant<1>(), tile_rows);
      };
      full ? run_panels(Constant<kTileRows>()) : run_panels(Constant<1>());
      r += full ? kTileRows : 1;
    }
    for (int64_t p = 0; p < some; ++p) {
      const int64_t from = (panel + p) * kPanel;
      put_sums(sums + p * kMostGroupRows, first, rows, c + from, std::min(kPanel, count - from), to);
    }
  }
}

// to.out[c, r] = dot(weight row r, x row c) * to.by[c] * to.row_scale[r], rounded, + to.bias[r], rounded.
template <class T>
void many_rows(const int8_t* weight, int64_t rows, const int8_t* x, int64_t inputs, int64_t columns,
               const Result<T>& to) {
  const int64_t fit = kGroupBytes / std::max<int64_t>(columns, 1) / kTileRows * kTileRows;
  // Several groups for each thread, or one would wait for the other at the end.
  const int64_t even = (rows / (8 * thread_count()) + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t group_rows = std::max<int64_t>(std::min({fit, kMostGroupRows, std::max<int64_t>(even, 16)}), kTileRows);
  const int64_t groups = (rows + group_rows - 1) / group_rows;
  const int64_t chunk = std::max(kChunkBytes / std::max<int64_t>(columns, 1) / (kPanels * kPanel), int64_t(1)) * kPanels * kPanel;
  for (int64_t c = 0; c < inputs; c += chunk) {
    const int64_t count = std::min(chunk, inputs - c);
    const PackedRows packed(x + c * columns, count, columns);
    parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * group_rows;
        group(weight, first, std::min(group_rows, rows - first), columns, packed, c, count, to);
      }
    });
  }
}

}  // namespace dlinfer::int8

#endif
