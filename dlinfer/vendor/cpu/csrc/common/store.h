// The first lanes of float32 stored in another floating dtype: to the nearest, halves to even; any NaN stays NaN.
#pragma once

#include "common/lanes.h"

namespace dlinfer {

// The first `count` lanes, at most kLanes.
template <class T>
inline void store_narrow(T* to, Floats lanes, int64_t count) {
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = T(lanes[lane]);
}

// Of a register with kLanes numbers of T.
template <class T, class Register>
inline void store_first(T* to, Register narrow, int64_t count) {
  static_assert(sizeof narrow == kLanes * sizeof(T));
  count == kLanes ? std::memcpy(to, &narrow, sizeof narrow) : std::memcpy(to, &narrow, count * sizeof(T));
}

template <>
inline void store_narrow(float* to, Floats lanes, int64_t count) {
  store_first(to, lanes, count);
}

template <>
inline void store_narrow(BFloat16* to, Floats lanes, int64_t count) {
  using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  const Words bits = (Words)lanes, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const Words kept = lanes == lanes ? rounded : (bits >> 16 | 0x40u);
  store_first(to, __builtin_convertvector(kept, Halves), count);
}

#if defined(__F16C__)

template <>
inline void store_narrow(Half* to, Floats lanes, int64_t count) {
#if defined(__AVX512F__)
  store_first(to, _mm512_cvtps_ph((__m512)lanes, _MM_FROUND_TO_NEAREST_INT), count);
#else
  store_first(to, _mm256_cvtps_ph((__m256)lanes, _MM_FROUND_TO_NEAREST_INT), count);
#endif
}

#endif

}  // namespace dlinfer
