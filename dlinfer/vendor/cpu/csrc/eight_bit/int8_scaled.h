// Exact sums of int8 products are scaled in float32 and rounded, and a bias is added, as in the op's reference.
#pragma once

#include <cstdint>

#include "common/narrow.h"

namespace dlinfer::int8 {

// A scale for each row of x and of the weight, a bias or null, and where row c of x and r of the weight put their number.
template <class T>
struct Result {
  const float *by, *row_scale;
  const T* bias;
  T* out;
  int64_t stride;
};

// NaN with nothing in its lower half, so that it stays one when it is rounded.
inline Floats with_plain_nan(Floats value) {
  const Words is_number = (Words)(value == value);
  return (Floats)(((Words)value & is_number) | (~is_number & 0x7fc00000u));
}

inline Floats as_floats(Words sums) {
  using Whole = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
  return __builtin_convertvector((Whole)sums, Floats);
}

// The numbers of row c of x and of `count` <= kLanes rows of the weight from r on, of sums times the scale of c.
template <class T>
inline void put(Floats scaled, int64_t c, int64_t r, int64_t count, const Result<T>& to) {
  const bool whole = count == kLanes;
  const Floats scale = with_plain_nan(whole ? widen(to.row_scale + r) : widen_part(to.row_scale + r, count));
  Floats value = rounded<T>(scaled * scale);
  if (to.bias) {
    value = by_itself(value) + (whole ? widen(to.bias + r) : widen_part(to.bias + r, count));
  }
  T* const line = to.out + c * to.stride + r;
  whole ? narrow(line, value) : narrow_part(line, value, count);
}

}  // namespace dlinfer::int8
