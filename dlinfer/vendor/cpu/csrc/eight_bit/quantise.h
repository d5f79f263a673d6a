// Rows of float32 as 8-bit numbers with a scale, and what is needed to get there: the largest value, whole vectors.
//
// It rounds a vector at a time. A branch for each element, on the nearer whole number, is predicted wrong every other
// time, and each wrong one costs as much as rounding a vector.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/narrow.h"
#include "eight_bit/fp8.h"

namespace dlinfer::eight_bit {

using Whole = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));

// The first `count` lanes, at most kLanes, of what is a function of a vector, for all vectors of a row.
template <class Each>
inline void for_vectors(int64_t count, const Each& each) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) each(i, int64_t(kLanes));
  if (i < count) each(i, count - i);
}

inline Floats load_floats(const float* from, int64_t count) {
  return count == kLanes ? load_as<Floats>(from) : load_part<Floats>(from, count);
}

inline void put_bytes(uint8_t* to, Bytes bytes, int64_t count) {
  count == kLanes ? std::memcpy(to, &bytes, sizeof bytes) : std::memcpy(to, &bytes, count);
}

// The largest absolute value; NaN where there is one.
inline float largest(const float* row, int64_t count) {
  uint32_t most = 0;  // the bits of absolute values are in their order, and NaN comes last
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu);
  return std::bit_cast<float>(most);
}

// Values, and -128 or 127 in place of what is beyond.
inline Floats within_int8(Floats value) {
  const Floats most = all_lanes(127.0f), least = all_lanes(-128.0f);
  return value > most ? most : value < least ? least : value;
}

// Of values between -128.5 and 127.5 the nearest whole numbers, halves away from zero.
inline Bytes nearest(Floats value) {
  const Whole whole = __builtin_convertvector(value, Whole);  // towards zero
  const Floats rest = value - __builtin_convertvector(whole, Floats);
  const Whole up = (Whole)(rest >= 0.5f), down = (Whole)(rest <= -0.5f);  // -1 where it is so
  return __builtin_convertvector((Words)(whole - up + down), Bytes);
}

// The nearest float8 to values, and to the largest what is beyond it.
inline Bytes nearest_fp8(Floats value) {
  const Floats most = all_lanes(fp8::kLargest);
  value = value > most ? most : value < -most ? -most : value;
  const Words bits = (Words)value, sign = bits >> 24 & 0x80, size = bits & 0x7fffffffu;
  // Below 2 ** -6 numbers are whole multiples of 2 ** -9, and so are the last digits of what is about 2 ** 14.
  const Words small = (Words)((Floats)size + 16384.0f) - 0x46800000u;
  const Words large = (size + 0x7ffffu + (size >> 20 & 1) - (120u << 23)) >> 20;
  const Words chosen = size < (121u << 23) ? small : large;
  const Words nan = Words{} + uint32_t(fp8::kNaN);
  return __builtin_convertvector(sign | (size > 0x7f800000u ? nan : chosen), Bytes);
}

// row / its scale as 8-bit numbers; gives the scale.
inline float quantise(const float* row, int64_t count, float least, bool is_int8, uint8_t* out) {
  const float most = largest(row, count), scale = (most < least ? least : most) / (is_int8 ? 127.0f : fp8::kLargest);
  if (scale == 0.0f) {
    std::fill_n(out, count, uint8_t(0));
  } else if (is_int8 && scale < std::numeric_limits<float>::min()) {
    // A subnormal scale has few digits: the largest value may be 190 times as much. To look at others' costs a fifth.
    for_vectors(count, [&](int64_t i, int64_t some) {
      put_bytes(out + i, nearest(within_int8(load_floats(row + i, some) / all_lanes(scale))), some);
    });
  } else if (is_int8) {
    for_vectors(count, [&](int64_t i, int64_t some) {
      put_bytes(out + i, nearest(load_floats(row + i, some) / all_lanes(scale)), some);
    });
  } else {
    for_vectors(count, [&](int64_t i, int64_t some) {
      put_bytes(out + i, nearest_fp8(load_floats(row + i, some) / all_lanes(scale)), some);
    });
  }
  return scale;
}

}  // namespace dlinfer::eight_bit
