// 2 to the power of lanes, and functions of it for attention.
#pragma once

#include "common/widen.h"

namespace dlinfer {

// Lane by lane the larger one; b where one of them is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// 2**x for x of at most about 0, within two units in the last place: 2**n * 2**r with r in [-1/2, 1/2], and 2**r by a
// polynomial fitted to that range, which is exactly 1 at 0. -inf gives 0, and NaN stays NaN. Below -126, where results
// are no normal numbers, they may be 0.
inline Floats exp2_of_negative(Floats x) {
  const auto series = [](Floats r) __attribute__((always_inline)) {
    Floats sum = all_lanes(0x1.5bba14p-10f);
    sum = multiply_add(all_lanes(0x1.3cea88p-7f), sum, r);
    sum = multiply_add(all_lanes(0x1.c6b752p-5f), sum, r);
    sum = multiply_add(all_lanes(0x1.ebf9bcp-3f), sum, r);
    sum = multiply_add(all_lanes(0x1.62e42ap-1f), sum, r);
    return multiply_add(all_lanes(1.0f), sum, r);
  };
#if defined(__AVX512F__)
  const Floats bounded = larger(all_lanes(-200.0f), x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)bounded, 0);
  return (Floats)_mm512_scalef_ps((__m512)series(bounded - n), (__m512)n);
#else
  const Floats magic = all_lanes(0x1.8p23f), least = all_lanes(-126.0f);
  const Floats bounded = larger(least, x), shifted = bounded + magic;  // the nearest whole number in its lower bits
  const Floats power = (Floats)(((Words)shifted << 23) + (Words)all_lanes(1.0f));
  const Floats result = series(bounded - (shifted - magic)) * power;
  return x < least ? Floats{} : result;
#endif
}

#if defined(__AVX512BF16__)

// 2**x with a relative error of 1e-4, a twentieth of bfloat16's rounding: 2**floor(x) * 2**r with r in [0, 1). It takes
// five instructions, the exact one nine.
inline Floats rough_exp2_of_negative(Floats x) {
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // 0 for -inf
  Floats sum = all_lanes(0x1.3baaa8p-4f);
  sum = multiply_add(all_lanes(0x1.d2378ap-3f), sum, r);
  sum = multiply_add(all_lanes(0x1.63e658p-1f), sum, r);
  sum = multiply_add(all_lanes(1.0f), sum, r);
  return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)x);
}

#endif

// tanh, within 1e-7 of its value.
inline Floats tanh_of(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats size = (Floats)((Words)x & 0x7fffffffu), one = all_lanes(1.0f);
  const Floats e = exp2_of_negative(size * all_lanes(-0x1.715476p1f));  // exp(-2 size)
  return (Floats)((Words)((one - e) / (one + e)) | sign);
}

}  // namespace dlinfer
