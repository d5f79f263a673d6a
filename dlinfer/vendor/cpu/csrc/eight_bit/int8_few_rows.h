// x @ weight.T for few rows of x in int8, summed exactly in int32, with a weight as torch stores it.
//
// If the processor multiplies unsigned by signed bytes, the weight is raised by 128 to be unsigned as it is loaded.
// That adds 128 times the sum of x's row, which is subtracted again; sums may wrap on the way, and both steps cancel.
// On other processors both are widened to 16 bits, and pairs are multiplied and added exactly.
//
// Roofline: reading the weight; one row of x needs two instructions for 64 bytes. While a thread computes 16 rows of
// the weight, it touches the next 16. For one row of x it reads them in order: memory gives one long stream sooner than
// 16 side by side (a fifth less time on Zen 5).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/lanes.h"
#include "common/processor.h"
#include "eight_bit/int8_scaled.h"
#include "threads/team.h"

namespace dlinfer::int8 {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

using Input = int8_t;
using Operand = __m512i;
constexpr int kStep = 64, kTileInputs = 4;
constexpr bool kShifted = true;
constexpr int tile_rows(int inputs) { return inputs == 1 ? 16 : inputs <= 3 ? 8 : 4; }
inline __mmask64 first(int64_t count) { return ~0ull >> (64 - count); }
inline Operand moved_up(Operand bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(char(0x80))); }
inline Operand load(const int8_t* from) { return moved_up(_mm512_loadu_si512(from)); }
inline Operand load(const int8_t* from, int64_t count) { return moved_up(_mm512_maskz_loadu_epi8(first(count), from)); }
inline Operand load_input(const Input* from) { return _mm512_loadu_si512(from); }
inline Operand load_input(const Input* from, int64_t count) { return _mm512_maskz_loadu_epi8(first(count), from); }
inline Words dot(Words sum, Operand weight, Operand x) { return (Words)_mm512_dpbusd_epi32((__m512i)sum, weight, x); }

#elif defined(__AVX2__)

using Input = int16_t;
using Operand = __m256i;
constexpr int kStep = 16, kTileInputs = 2;
constexpr bool kShifted = false;
constexpr int tile_rows(int) { return 4; }
inline Operand load(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }
inline Operand load(const int8_t* from, int64_t count) {
  int8_t part[kStep]{};
  std::memcpy(part, from, count);
  return load(part);
}
inline Operand load_input(const Input* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Operand load_input(const Input* from, int64_t count) { return load_part<Operand>(from, count); }
inline Words dot(Words sum, Operand weight, Operand x) {
  const auto added = _mm256_madd_epi16(x, weight);
#if defined(__AVX512F__)
  return (Words)_mm512_add_epi32((__m512i)sum, _mm512_zextsi256_si512(added));
#else
  return (Words)_mm256_add_epi32((__m256i)sum, added);
#endif
}

#elif defined(__ARM_FEATURE_DOTPROD)

using Input = int8_t;
using Operand = int8x16_t;
constexpr int kStep = 16, kTileInputs = 4;
constexpr bool kShifted = false;
constexpr int tile_rows(int) { return 4; }
inline Operand load(const int8_t* from) { return vld1q_s8(from); }
inline Operand load(const int8_t* from, int64_t count) { return load_part<Operand>(from, count); }
inline Operand load_input(const Input* from) { return load(from); }
inline Operand load_input(const Input* from, int64_t count) { return load(from, count); }
inline Words dot(Words sum, Operand weight, Operand x) { return (Words)vdotq_s32((int32x4_t)sum, weight, x); }

#else

using Input = int8_t;
using Operand = Words;
constexpr int kStep = kLanes, kTileInputs = 2;
constexpr bool kShifted = false;
constexpr int tile_rows(int) { return 4; }
inline Operand load(const int8_t* from, int64_t count) {
  Words wide{};
  for (int64_t i = 0; i < count; ++i) wide[i] = uint32_t(int32_t(from[i]));
  return wide;
}
inline Operand load(const int8_t* from) { return load(from, kStep); }
inline Operand load_input(const Input* from) { return load(from); }
inline Operand load_input(const Input* from, int64_t count) { return load(from, count); }
inline Words dot(Words sum, Operand weight, Operand x) { return sum + weight * x; }

#endif

constexpr int64_t kBlockRows = 16;             // rows of the weight that a thread takes at once
constexpr int64_t kBytesPerThread = 64 << 10;  // of the weight: below this a thread is done before another has begun

// Rows of x as the products take them.
class Inputs {
 public:
  Inputs(const int8_t* x, int64_t count, int64_t columns) : columns_(columns) {
    if constexpr (kShifted) {
      for (int64_t c = 0; c < count; ++c) {
        int32_t sum = 0;
        for (int64_t i = 0; i < columns; ++i) sum += x[c * columns + i];
        too_much_.push_back(uint32_t(sum) * 128);
      }
    }
    if constexpr (sizeof(Input) == 1) {
      data_ = reinterpret_cast<const Input*>(x);
    } else {
      wide_.assign(x, x + count * columns);
      data_ = wide_.data();
    }
  }
  const Input* operator[](int64_t row) const { return data_ + row * columns_; }
  uint32_t too_much(int64_t row) const { return kShifted ? too_much_[row] : 0; }

 private:
  int64_t columns_;
  std::vector<uint32_t> too_much_;
  std::vector<Input> wide_;
  const Input* data_;
};

// Where a tile touches memory ahead of its need, 64 bytes at a time.
struct Next {
  const int8_t* line;
  int64_t step;  // bytes: 64, or none
};

// sums[c * kBlockRows + r] = dot(weight row r, x row c), not yet less what is too much.
template <int kRows, int kInputs>
void tile(const int8_t* weight, int64_t columns, const Input* x, Next& next, uint32_t* sums) {
  constexpr int kCount = kRows * kInputs;
  Words kept[kCount]{};
  const auto add = [&](int64_t at, auto... count) __attribute__((always_inline)) {
    Operand inputs[kInputs];
#pragma GCC unroll 4
    for (int c = 0; c < kInputs; ++c) inputs[c] = load_input(x + c * columns + at, count...);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Operand row = load(weight + r * columns + at, count...);
#pragma GCC unroll 4
      for (int c = 0; c < kInputs; ++c) kept[c * kRows + r] = dot(kept[c * kRows + r], row, inputs[c]);
    }
  };
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) {
#pragma GCC unroll 16
    for (int touched = 0; touched < std::max(kRows * kStep / 64, 1); ++touched) {
      __builtin_prefetch(next.line, 0, 2);  // not the first level
      next.line += next.step;
    }
    add(at);
  }
  if (at < columns) add(at, columns - at);

#pragma GCC unroll 16
  for (int first = 0; first < kCount; first += kLanes) {
    constexpr int kGroup = std::min(kCount, kLanes);
    Words group[kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) group[i] = first + i < kCount ? kept[first + i] : Words{};
    sum_lanes<kGroup>(group);
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) {
      if (first + i < kCount) sums[(first + i) / kRows * kBlockRows + (first + i) % kRows] = group[0][i];
    }
  }
}

// Of one row of x. On Zen 4 hints into the second level take 0.73 to 0.93 of the time of those into the first.
constexpr Hints kZen5Hints{4 << 10, 3}, kHints{4 << 10, 2};

// The same of one row of x, a row of the weight after the other: memory is read in its order, and far ahead of it.
template <Hints kFetched, int kRows>
void rows_in_order(const int8_t* weight, int64_t columns, const Input* x, uint32_t* sums) {
  Words kept[kRows];
  for (int r = 0; r < kRows; ++r, weight += columns) {
    Words even{}, odd{};
    int64_t at = 0;
    for (; at + 2 * kStep <= columns; at += 2 * kStep) {
#pragma GCC unroll 2
      for (int64_t line = 0; line < 2 * kStep; line += 64) fetch<kFetched>(weight + at + line);
      even = dot(even, load(weight + at), load_input(x + at));
      odd = dot(odd, load(weight + at + kStep), load_input(x + at + kStep));
    }
    if (at + kStep <= columns) even = dot(even, load(weight + at), load_input(x + at)), at += kStep;
    if (at < columns) odd = dot(odd, load(weight + at, columns - at), load_input(x + at, columns - at));
    kept[r] = even + odd;
  }
  sum_lanes<kRows>(kept);
  std::memcpy(sums, &kept[0], kRows * sizeof(uint32_t));
}

// Tiles over `rows` <= kBlockRows rows of the weight, kInputs rows of x.
template <int kInputs>
void block_of(const int8_t* weight, int64_t rows, int64_t columns, const Input* x, Next& next, uint32_t* sums) {
  constexpr int kRows = tile_rows(kInputs);
  if constexpr (kInputs == 1 && kRows == kLanes) {
    if (rows == kRows) {
      return is_zen5_or_later() ? rows_in_order<kZen5Hints, kRows>(weight, columns, x, sums)
                                : rows_in_order<kHints, kRows>(weight, columns, x, sums);
    }
  }
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) tile<kRows, kInputs>(weight + r * columns, columns, x, next, sums + r);
  for (; r < rows; ++r) tile<1, kInputs>(weight + r * columns, columns, x, next, sums + r);
}

using BlockOf = void (*)(const int8_t*, int64_t, int64_t, const Input*, Next&, uint32_t*);

template <int... I>
constexpr BlockOf block_of_inputs(int64_t inputs, std::integer_sequence<int, I...>) {
  constexpr BlockOf all[] = {block_of<I + 1>...};
  return all[inputs - 1];
}

// to.out[c, r] = dot(weight row r, x row c) * to.by[c] * to.row_scale[r], rounded, + to.bias[r], rounded.
template <class T>
void few_rows(const int8_t* weight, int64_t rows, const int8_t* x, int64_t count, int64_t columns, const Result<T>& to) {
  const Inputs inputs(x, count, columns);
  const int64_t passes = (count + kTileInputs - 1) / kTileInputs, together = (count + passes - 1) / passes;
  const int64_t grain = std::max<int64_t>(kBytesPerThread / std::max<int64_t>(kBlockRows * columns, 1), 1);
  parallel_for(0, (rows + kBlockRows - 1) / kBlockRows, grain, [&](int64_t begin, int64_t end) {
    uint32_t sums[kTileInputs * kBlockRows]{};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kBlockRows, some = std::min(kBlockRows, rows - first);
      const int8_t* const lines = weight + first * columns;
      Next next{lines + some * columns, i + 1 < end ? 64 : 0};
      for (int64_t c = 0; c < count; c += together) {
        const int64_t taken = std::min(together, count - c);
        block_of_inputs(taken, std::make_integer_sequence<int, kTileInputs>())(lines, some, columns, inputs[c], next, sums);
        next.step = 0;
        for (int64_t j = 0; j < taken; ++j) {
          const Floats by = with_plain_nan(all_lanes(to.by[c + j]));
          for (int64_t r = 0; r < some; r += kLanes) {
            const Words exact = load_as<Words>(sums + j * kBlockRows + r) - inputs.too_much(c + j);
            put(as_floats(exact) * by, c + j, first + r, std::min<int64_t>(kLanes, some - r), to);
          }
        }
      }
    }
  });
}

}  // namespace dlinfer::int8
