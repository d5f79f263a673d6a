// kLanes neighbours of any floating dtype as float32, and exp of them.
#pragma once

#include "common/lanes.h"

namespace dlinfer {

template <class T>
inline Floats widen(const T* from) {
  Floats wide;
  for (int lane = 0; lane < kLanes; ++lane) wide[lane] = float(from[lane]);
  return wide;
}

template <>
inline Floats widen(const float* from) {
  return load_as<Floats>(from);
}

template <>
inline Floats widen(const BFloat16* from) {
  using Narrow = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  const auto narrow = load_as<Narrow>(from);
#if defined(__AVX512F__)
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)narrow) << 16);
#elif defined(__AVX2__)
  return (Floats)((Words)_mm256_cvtepu16_epi32((__m128i)narrow) << 16);
#else
  return (Floats)(__builtin_convertvector(narrow, Words) << 16);
#endif
}

template <>
inline Floats widen(const Half* from) {
  return Operands<Half>::load(from);
}

// The first `count` elements, then zeros.
template <class T>
inline Floats widen_part(const T* from, int64_t count) {
  T whole[kLanes]{};
  std::memcpy(whole, from, count * sizeof(T));
  return widen(whole);
}

template <>
inline Floats widen_part(const float* from, int64_t count) {
  return load_part<Floats>(from, count);
}

// exp of numbers that are at most 0, within two units in the last place; below -87.3, where the result is no normal
// number any more, it is 0. exp(x) = 2**n * exp(r) with r in [-ln 2 / 2, ln 2 / 2], and exp(r) by the first terms of
// its series. NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
  const Floats magic = all_lanes(0x1.8p23f), least = all_lanes(-87.33654f);
  const Floats shifted = multiply_add(magic, x, all_lanes(0x1.715476p0f));  // the nearest whole number in its lower bits
  const Floats n = shifted - magic;
  Floats r = multiply_add(x, n, all_lanes(-0x1.62e4p-1f));  // ln 2 in two parts, the first exact in a few bits
  r = multiply_add(r, n, all_lanes(-0x1.7f7d1cp-20f));
  Floats series = all_lanes(1.0f / 5040);
  series = multiply_add(all_lanes(1.0f / 720), series, r);
  series = multiply_add(all_lanes(1.0f / 120), series, r);
  series = multiply_add(all_lanes(1.0f / 24), series, r);
  series = multiply_add(all_lanes(1.0f / 6), series, r);
  series = multiply_add(all_lanes(0.5f), series, r);
  series = multiply_add(all_lanes(1.0f), series, r);
  series = multiply_add(all_lanes(1.0f), series, r);
  const Floats power = (Floats)(((Words)shifted << 23) + ((Words)all_lanes(1.0f)));
  const Floats result = series * power;
  return x < least ? Floats{} : result;
}

}  // namespace dlinfer
