// float32 lanes rounded to a floating dtype, to the nearest and halves to even, and put back as neighbours in memory.
#pragma once

#include "common/widen.h"

namespace dlinfer {

// The values as T has them, still in float32.
template <class T>
inline Floats rounded(Floats value);

// kLanes neighbours.
template <class T>
inline void narrow(T* to, Floats value);

template <>
inline Floats rounded<float>(Floats value) {
  return value;
}

template <>
inline void narrow(float* to, Floats value) {
  std::memcpy(to, &value, sizeof value);
}

// For values that were computed from 16-bit numbers: a NaN among those, and one that the processor makes itself, has
// nothing in its lower half, so it stays one.
template <>
inline Floats rounded<BFloat16>(Floats value) {
  const Words bits = (Words)value;
  return (Floats)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

template <>
inline void narrow(BFloat16* to, Floats value) {
  using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  const Words bits = (Words)value, upper = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#if defined(__AVX512F__)
  const auto halves = (Halves)_mm512_cvtepi32_epi16((__m512i)upper);
#elif defined(__AVX2__)
  const auto all = (__m256i)upper;
  const auto halves = (Halves)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
#else
  const Halves halves = __builtin_convertvector(upper, Halves);
#endif
  std::memcpy(to, &halves, sizeof halves);
}

template <>
inline void narrow(Half* to, Floats value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__F16C__) && defined(__AVX__)
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(__aarch64__)
  const float16x4_t halves = vcvt_f16_f32((float32x4_t)value);
  std::memcpy(to, &halves, sizeof halves);
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = Half(value[lane]);
#endif
}

template <>
inline Floats rounded<Half>(Floats value) {
  Half halves[kLanes];
  narrow(halves, value);
  return widen(halves);
}

// The first `count` of them.
template <class T>
inline void narrow_part(T* to, Floats value, int64_t count) {
  T whole[kLanes];
  narrow(whole, value);
  std::memcpy(to, whole, count * sizeof(T));
}

}  // namespace dlinfer
