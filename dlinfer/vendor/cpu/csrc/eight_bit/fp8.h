// float8_e4m3fn: one sign, four bits of exponent with bias 7, three of mantissa, no infinities, NaN at the end.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/lanes.h"

namespace dlinfer::fp8 {

constexpr float kLargest = 448.0f;
constexpr uint8_t kNaN = 0x7f;

constexpr float widened(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float value = exponent ? float(8 + mantissa) : float(mantissa);
  for (int i = exponent ? exponent : 1; i < 10; ++i) value *= 0.5f;
  for (int i = 10; i < exponent; ++i) value *= 2.0f;
  if ((bits & kNaN) == kNaN) value = std::numeric_limits<float>::quiet_NaN();
  return bits & 0x80 ? -value : value;
}

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))

// The bits of a number, moved, are those of a half-precision one that is 2 ** 8 times less; but for NaN, which `found`
// tells of.
constexpr float kStored = 256.0f;

#if defined(__AVX512F__)
using Halves = __m256i;
inline Halves load_halves(const uint8_t* from) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)); }
inline Floats widened_halves(Halves halves) { return (Floats)_mm512_cvtph_ps(halves); }
using Wide = uint16_t __attribute__((vector_size(32)));
#else
using Halves = __m128i;
inline Halves load_halves(const uint8_t* from) { return _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)); }
inline Floats widened_halves(Halves halves) { return (Floats)_mm256_cvtph_ps(halves); }
using Wide = uint16_t __attribute__((vector_size(16)));
#endif

struct Found {
  Wide any{};
  bool nan() const {
    uint16_t lanes[sizeof(Wide) / 2], all = 0;
    std::memcpy(lanes, &any, sizeof any);
    for (uint16_t lane : lanes) all |= lane;
    return all != 0;
  }
};

// kLanes neighbours, as float32 over kStored.
inline Floats load(const uint8_t* from, Found& found) {
  const auto bits = (Wide)load_halves(from);
  found.any |= (Wide)((bits & 0x7f) == 0x7f);
  return widened_halves((Halves)((bits << 7 & 0x3f80) | (bits << 8 & 0x8000)));
}

#else

constexpr float kStored = 1.0f;

constexpr auto kTable = [] {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[i] = widened(uint8_t(i));
  return table;
}();

struct Found {
  bool nan() const { return false; }  // NaN are in the table
};

inline Floats load(const uint8_t* from, Found&) {
  Floats wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = kTable[from[i]];
  return wide;
}

#endif

inline Floats load(const uint8_t* from, int64_t count, Found& found) {
  uint8_t part[kLanes]{};
  std::memcpy(part, from, count);
  return load(part, found);
}

// Rows of numbers, and the scales of their blocks: number (r, i) is multiplied by scale[r / rows][i / columns].
struct Weight {
  const uint8_t* data;
  int64_t stride;
  const float* scale;
  int64_t scale_stride, rows, columns;

  const float* scales(int64_t r) const { return scale + r / rows * scale_stride; }
};

// sums[c * kRows + r] = dot(row first + r of the weight, x row c).
template <int kRows, int kInputs>
void tile(const Weight& weight, int64_t first, const float* x, int64_t x_stride, int64_t columns, float* sums) {
  Floats accumulators[kRows * kInputs]{};
  Found found[kRows];
  const uint8_t* rows[kRows];
  const float* scales[kRows];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = weight.data + (first + r) * weight.stride;
    scales[r] = weight.scales(first + r);
  }
  for (int64_t begin = 0, block = 0; begin < columns; begin += weight.columns, ++block) {
    const int64_t end = std::min(begin + weight.columns, columns);
    Floats scale[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) scale[r] = Floats{} + scales[r][block] * kStored;
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      Floats wide[kRows];
      // The following rows come next. The hardware prefetcher starts again at each row, and rows are too short for it.
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(rows[r] + kRows * weight.stride + at, 0, 2);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) wide[r] = load(rows[r] + at, found[r]) * scale[r];
#pragma GCC unroll 8
      for (int c = 0; c < kInputs; ++c) {
        const Floats input = load_as<Floats>(x + c * x_stride + at);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          accumulators[c * kRows + r] = multiply_add(accumulators[c * kRows + r], wide[r], input);
        }
      }
    }
    if (at == end) continue;
    for (int r = 0; r < kRows; ++r) {
      const Floats wide = load(rows[r] + at, end - at, found[r]) * scale[r];
      for (int c = 0; c < kInputs; ++c) {
        const Floats input = load_part<Floats>(x + c * x_stride + at, end - at);
        accumulators[c * kRows + r] = multiply_add(accumulators[c * kRows + r], wide, input);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kInputs; ++c) {
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += accumulators[c * kRows + r][lane];
      sums[c * kRows + r] = found[r].nan() ? std::numeric_limits<float>::quiet_NaN() : sum;
    }
  }
}

template <int kRows>
void tile_of(int64_t inputs, const Weight& weight, int64_t first, const float* x, int64_t x_stride, int64_t columns,
             float* sums) {
  switch (inputs) {
    case 1:
      return tile<kRows, 1>(weight, first, x, x_stride, columns, sums);
    case 2:
      return tile<kRows, 2>(weight, first, x, x_stride, columns, sums);
    case 3:
      return tile<kRows, 3>(weight, first, x, x_stride, columns, sums);
    default:
      return tile<kRows, 4>(weight, first, x, x_stride, columns, sums);
  }
}

// A row of the weight, scaled, in float32.
inline void widen(const Weight& weight, int64_t row, int64_t columns, float* out) {
  const uint8_t* from = weight.data + row * weight.stride;
  const float* scales = weight.scales(row);
  Found found;
  for (int64_t begin = 0, block = 0; begin < columns; begin += weight.columns, ++block) {
    const int64_t end = std::min(begin + weight.columns, columns);
    const float scale = scales[block] * kStored;
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      const Floats wide = load(from + at, found) * scale;
      std::memcpy(out + at, &wide, sizeof wide);
    }
    const Floats rest = at < end ? load(from + at, end - at, found) * scale : Floats{};
    std::memcpy(out + at, &rest, (end - at) * sizeof(float));
  }
  if (!found.nan()) return;
  for (int64_t i = 0; i < columns; ++i) {
    if ((from[i] & kNaN) == kNaN) out[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace dlinfer::fp8
