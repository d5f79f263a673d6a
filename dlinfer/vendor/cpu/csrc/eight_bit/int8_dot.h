// Dot products of int8 rows, summed exactly in int32, for few rows of x and a weight as torch stores it.
//
// Where the processor multiplies unsigned by signed bytes, x is moved up by 128 to be unsigned, and what that adds, 128
// times the sum of the weight's row, is taken off again; sums may wrap on the way, which adding and taking off undo.
// Elsewhere both are widened to 16 bits, of which pairs are multiplied and added exactly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dlinfer::int8 {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

using Input = uint8_t;  // x + 128
using Sum = __m512i;
constexpr int kStep = 64, kTileInputs = 4;
constexpr bool kShifted = true;
inline Input input(int8_t value) { return Input(value) ^ 0x80; }
inline Sum zero() { return _mm512_setzero_si512(); }
inline Sum load(const int8_t* from) { return _mm512_loadu_si512(from); }
inline Sum load(const int8_t* from, int64_t count) { return _mm512_maskz_loadu_epi8(~0ull >> (64 - count), from); }
inline Sum load_input(const Input* from) { return _mm512_loadu_si512(from); }
inline Sum shift() { return _mm512_set1_epi8(char(0x80)); }
inline Sum dot(Sum sum, Sum x, Sum weight) { return _mm512_dpbusd_epi32(sum, x, weight); }
inline uint32_t total(Sum sum) { return uint32_t(_mm512_reduce_add_epi32(sum)); }

#elif defined(__AVX2__)

using Input = int16_t;
using Sum = __m256i;
constexpr int kStep = 16, kTileInputs = 2;
constexpr bool kShifted = false;
inline Input input(int8_t value) { return value; }
inline Sum zero() { return _mm256_setzero_si256(); }
inline Sum load(const int8_t* from) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)); }
inline Sum load(const int8_t* from, int64_t count) {
  int8_t part[kStep]{};
  std::memcpy(part, from, count);
  return load(part);
}
inline Sum load_input(const Input* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Sum shift() { return zero(); }
inline Sum dot(Sum sum, Sum x, Sum weight) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, weight)); }
inline uint32_t total(Sum sum) {
  uint32_t lanes[8], all = 0;
  _mm256_storeu_si256((__m256i*)lanes, sum);
  for (uint32_t lane : lanes) all += lane;
  return all;
}

#else

using Input = int16_t;
constexpr int kStep = 8, kTileInputs = 2;
constexpr bool kShifted = false;
using Sum = int32_t __attribute__((vector_size(4 * kStep)));
inline Input input(int8_t value) { return value; }
inline Sum zero() { return Sum{}; }
template <class T>
inline Sum widen(const T* from, int64_t count) {
  Sum wide{};
  for (int64_t i = 0; i < count; ++i) wide[i] = from[i];
  return wide;
}
inline Sum load(const int8_t* from) { return widen(from, kStep); }
inline Sum load(const int8_t* from, int64_t count) { return widen(from, count); }
inline Sum load_input(const Input* from) { return widen(from, kStep); }
inline Sum shift() { return Sum{}; }
inline Sum dot(Sum sum, Sum x, Sum weight) { return sum + x * weight; }
inline uint32_t total(Sum sum) {
  uint32_t all = 0;
  for (int i = 0; i < kStep; ++i) all += uint32_t(sum[i]);
  return all;
}

#endif

// Rows of x as the products want them, each padded to whole steps; what the padding holds meets zeros.
class Inputs {
 public:
  Inputs(const int8_t* x, int64_t count, int64_t columns)
      : stride_((columns + kStep - 1) / kStep * kStep), data_(count * stride_) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t i = 0; i < columns; ++i) data_[c * stride_ + i] = input(x[c * columns + i]);
    }
  }
  const Input* operator[](int64_t row) const { return data_.data() + row * stride_; }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  std::vector<Input> data_;
};

// sums[c * kRows + r] = dot(weight row r, x row c).
template <int kRows, int kInputs>
void tile(const int8_t* weight, int64_t weight_stride, const Input* x, int64_t x_stride, int64_t columns,
          int32_t* sums) {
  Sum accumulators[kRows * kInputs], added[kRows];
  for (auto& one : accumulators) one = zero();
  for (auto& one : added) one = zero();
  const auto add = [&](auto load_weight, int64_t at) __attribute__((always_inline)) {
    Sum rows[kRows];
    // The rows behind these come next; a processor that foresees reading begins anew at each row, which is too short.
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) __builtin_prefetch(weight + (kRows + r) * weight_stride + at, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) rows[r] = load_weight(weight + r * weight_stride + at);
    if constexpr (kShifted) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) added[r] = dot(added[r], shift(), rows[r]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kInputs; ++c) {
      const Sum input = load_input(x + c * x_stride + at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) accumulators[c * kRows + r] = dot(accumulators[c * kRows + r], input, rows[r]);
    }
  };
  int64_t at = 0;
  for (; at + kStep <= columns; at += kStep) add([](const int8_t* from) { return load(from); }, at);
  if (at < columns) add([rest = columns - at](const int8_t* from) { return load(from, rest); }, at);
  for (int r = 0; r < kRows; ++r) {
    const uint32_t too_much = kShifted ? total(added[r]) : 0;
    for (int c = 0; c < kInputs; ++c) sums[c * kRows + r] = int32_t(total(accumulators[c * kRows + r]) - too_much);
  }
}

template <int kRows>
void tile_of(int64_t inputs, const int8_t* weight, int64_t weight_stride, const Input* x, int64_t x_stride,
             int64_t columns, int32_t* sums) {
  switch (inputs) {
    case 1:
      return tile<kRows, 1>(weight, weight_stride, x, x_stride, columns, sums);
    case 2:
      return tile<kRows, 2>(weight, weight_stride, x, x_stride, columns, sums);
    case 3:
      return tile<kRows, std::min(3, kTileInputs)>(weight, weight_stride, x, x_stride, columns, sums);
    default:
      return tile<kRows, std::min(4, kTileInputs)>(weight, weight_stride, x, x_stride, columns, sums);
  }
}

}  // namespace dlinfer::int8
