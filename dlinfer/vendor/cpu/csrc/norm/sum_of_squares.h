// The squares of a row, added up in float32 in the order of torch's own sum.
//
// A norm's scale comes out of this sum. In another order its last digit differs. If a scaled value lies halfway between
// two 16-bit numbers, the result then differs by a whole step: one element of 60,000 of a bfloat16 norm. A model must
// give the same with torch's kernels and with these, so the order is torch's (aten/src/ATen/native/cpu/SumKernel.cpp):
// - column: kSumColumns sums take the row's vectors of kSumLanes in turn.
// - run: after kSumRun vectors a sum goes into that of the next level and begins anew; there after as many of them.
// - end: each column adds up its levels, the first one the other columns, and at last come the lanes one by one.
//
// Squares of 16-bit numbers are exact in float32, so a fused multiply-add changes nothing; of float32 it would, and is
// kept out. For fewer elements than kSumLanes, or more than 2 ** 24, torch has another order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/lanes.h"

namespace dlinfer::norms {

// torch has its sum for AVX2 and for what every x86-64 can do, both with 8 lanes, and none for AVX-512.
#if defined(__aarch64__)
constexpr int kSumLanes = 4;
#else
constexpr int kSumLanes = 8;
#endif
constexpr int kSumColumns = 4;
constexpr int kSumRun = 16;
constexpr int kSumLevels = 4;

using SumFloats = float __attribute__((vector_size(kSumLanes * sizeof(float))));
using SumWords = uint32_t __attribute__((vector_size(kSumLanes * sizeof(float))));
using SumHalves = uint16_t __attribute__((vector_size(kSumLanes * sizeof(uint16_t))));

// kSumLanes neighbours as float32; float32 values rounded to T; and such values put back as neighbours.
template <class T>
inline SumFloats widened(const T* from) {
  SumFloats wide;
  for (int lane = 0; lane < kSumLanes; ++lane) wide[lane] = float(from[lane]);
  return wide;
}

template <class T>
inline SumFloats rounded(SumFloats value) {
  for (int lane = 0; lane < kSumLanes; ++lane) value[lane] = float(T(value[lane]));
  return value;
}

template <class T>
inline void narrow(T* to, SumFloats value) {
  for (int lane = 0; lane < kSumLanes; ++lane) to[lane] = T(value[lane]);
}

template <>
inline SumFloats widened(const float* from) {
  return load_as<SumFloats>(from);
}

template <>
inline SumFloats rounded<float>(SumFloats value) {
  return value;
}

template <>
inline void narrow(float* to, SumFloats value) {
  std::memcpy(to, &value, sizeof value);
}

template <>
inline SumFloats widened(const BFloat16* from) {
  const auto halves = load_as<SumHalves>(from);
#if defined(__AVX2__)
  return (SumFloats)((SumWords)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#else
  return (SumFloats)(__builtin_convertvector(halves, SumWords) << 16);
#endif
}

// To the nearest, halves to even. A NaN that comes from 16-bit numbers, or that the processor makes itself, has nothing
// in its lower half, so it stays one.
template <>
inline SumFloats rounded<BFloat16>(SumFloats value) {
  const SumWords bits = (SumWords)value;
  return (SumFloats)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

template <>
inline void narrow(BFloat16* to, SumFloats value) {
  const SumWords upper = (SumWords)value >> 16;
#if defined(__AVX2__)
  const auto all = (__m256i)upper;
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
#else
  const SumHalves halves = __builtin_convertvector(upper, SumHalves);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

#if defined(__F16C__)

template <>
inline SumFloats widened(const Half* from) {
  return (SumFloats)_mm256_cvtph_ps((__m128i)load_as<SumHalves>(from));
}

template <>
inline SumFloats rounded<Half>(SumFloats value) {
  return (SumFloats)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}

template <>
inline void narrow(Half* to, SumFloats value) {
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
}

#endif

template <class T, class Number>
inline Number square(Number value) {
  if constexpr (std::is_same_v<T, float>) return by_itself(value * value);
  return value * value;
}

template <class T>
float sum_of_squares(const T* x, int64_t count) {
  const auto add_square = [x](SumFloats& sum, int64_t vector) __attribute__((always_inline)) {
    sum += square<T>(widened(x + vector * kSumLanes));
  };

  SumFloats sums[kSumLevels][kSumColumns]{};
  const int64_t vectors = count / kSumLanes, steps = vectors / kSumColumns;
  for (int64_t step = 0; step < steps;) {
    const int64_t end = std::min(step + kSumRun, steps);
    const bool full = end == step + kSumRun;
    for (; step < end; ++step) {
#pragma GCC unroll 4
      for (int c = 0; c < kSumColumns; ++c) add_square(sums[0][c], step * kSumColumns + c);
    }
    if (!full) break;
    int64_t runs = step;
    for (int level = 1; level < kSumLevels && runs % kSumRun == 0; ++level) {
      for (int c = 0; c < kSumColumns; ++c) {
        sums[level][c] += sums[level - 1][c];
        sums[level - 1][c] = SumFloats{};
      }
      runs /= kSumRun;
    }
  }
  for (int level = 1; level < kSumLevels; ++level) {
    for (int c = 0; c < kSumColumns; ++c) sums[0][c] += sums[level][c];
  }

  SumFloats lanes = sums[0][0];
  for (int64_t vector = steps * kSumColumns; vector < vectors; ++vector) add_square(lanes, vector);
  for (int c = 1; c < kSumColumns; ++c) lanes += sums[0][c];

  float sum = 0.0f;
  for (int64_t i = vectors * kSumLanes; i < count; ++i) sum += square<T>(float(x[i]));
  for (int lane = 0; lane < kSumLanes; ++lane) sum += lanes[lane];
  return sum;
}

}  // namespace dlinfer::norms
