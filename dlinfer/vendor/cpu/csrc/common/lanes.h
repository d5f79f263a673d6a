// Registers of float32 lanes, and what a dot product needs of them: loads that widen, multiply-add, sums over lanes.
//
// The vector extensions that GCC and Clang share let one source serve AVX-512, AVX2, SSE and NEON. Intrinsics stand
// only where a conversion or a dot instruction has no portable spelling. The library is compiled with -march=native on
// the machine that runs it, or for one of a wheel's levels, which better machines run too. The macros below describe
// the level, which may be less than the machine has.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace dlinfer {

using c10::BFloat16;
using c10::Half;

// kLanes: float32 lanes of a register. kAccumulators: how many a tile may keep beside its operands without spilling.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kAccumulators = 16;  // of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kAccumulators = 8;  // of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4, kAccumulators = 16;  // of 32
#else
constexpr int kLanes = 4, kAccumulators = 8;  // of 16
#endif

using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(float))));

template <class Register, class T>
inline Register load_as(const T* from) {
  Register loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

// The first `count` elements, then zeros: the end of a row, which must not be read beyond.
template <class Register, class T>
inline Register load_part(const T* from, int64_t count) {
  Register loaded{};
  std::memcpy(&loaded, from, count * sizeof(T));
  return loaded;
}

// The same value, but the compiler cannot fuse its product with the sum that follows: that would round once, where
// torch rounds twice.
template <class Register>
inline Register by_itself(Register value) {
#if defined(DLINFER_MODEL)
  asm("" : "+m"(value));  // no register is this wide
#elif defined(__FMA__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#endif
  return value;
}

// sum + a * b, rounded once where the machine can. The compiler's own choice depends on the loop around it. For AMD's
// processors GCC multiplies and adds where a single sum waits for itself. One row of x would then get other bits alone
// than among others.
inline Floats multiply_add(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  return sum + a * b;
#endif
}

// One number in all lanes, by the processor's own instruction where it has one.
inline Floats all_lanes(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Floats)_mm256_set1_ps(value);
#else
  return value - Floats{};  // keeps the sign of a zero
#endif
}

// Elements of type T in a dot product. kStep of them make an Operand, and dot(sum, a, b) adds the kStep products to the
// lanes of sum in float32.
template <class T>
struct Operands;

template <>
struct Operands<float> {
  static constexpr int kStep = kLanes;
  using Operand = Floats;
  static Operand load(const float* from) { return load_as<Floats>(from); }
  static Operand load(const float* from, int64_t count) { return load_part<Floats>(from, count); }
  static Floats dot(Floats sum, Operand a, Operand b) { return multiply_add(sum, a, b); }
};

#if defined(__AVX512BF16__)

// The instruction takes subnormal bfloat16 (below 1.2e-38) for zero.
template <>
struct Operands<BFloat16> {
  static constexpr int kStep = 2 * kLanes;
  using Operand = __m512bh;
  static Operand of(Words pairs) { return (Operand)pairs; }
  static Operand load(const BFloat16* from) { return load_as<Operand>(from); }
  static Operand load(const BFloat16* from, int64_t count) { return load_part<Operand>(from, count); }
  static Floats dot(Floats sum, Operand a, Operand b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b); }
};

#else

// A bfloat16 is the upper half of a float32. A word holds two neighbours: one widens by a shift, one by a mask, and
// since both operands are split alike, the products pair up without a shuffle.
template <>
struct Operands<BFloat16> {
  static constexpr int kStep = 2 * kLanes;
  struct Operand {
    Floats even, odd;
  };
  static Operand of(Words pairs) { return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)}; }
  static Operand load(const BFloat16* from) { return of(load_as<Words>(from)); }
  static Operand load(const BFloat16* from, int64_t count) { return of(load_part<Words>(from, count)); }
  static Floats dot(Floats sum, Operand a, Operand b) {
    return multiply_add(multiply_add(sum, a.even, b.even), a.odd, b.odd);
  }
};

#endif

#if defined(__F16C__) || defined(__aarch64__)
#define DLINFER_HAS_HALF 1

template <>
struct Operands<Half> {
  static constexpr int kStep = kLanes;
  using Operand = Floats;
  using Narrow = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  static Operand widen(Narrow narrow) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)narrow);
#else
    return (Floats)_mm256_cvtph_ps((__m128i)narrow);
#endif
  }
  static Operand load(const Half* from) { return widen(load_as<Narrow>(from)); }
  static Operand load(const Half* from, int64_t count) { return widen(load_part<Narrow>(from, count)); }
  static Floats dot(Floats sum, Operand a, Operand b) { return multiply_add(sum, a, b); }
};

#else

// One by one, which is slow: linear layers leave float16 to torch then, and attention reads few numbers.
template <>
struct Operands<Half> {
  static constexpr int kStep = kLanes;
  using Operand = Floats;
  static Operand load(const Half* from) { return load(from, kLanes); }
  static Operand load(const Half* from, int64_t count) {
    Operand wide{};
    for (int64_t lane = 0; lane < count; ++lane) wide[lane] = float(from[lane]);
    return wide;
  }
  static Floats dot(Floats sum, Operand a, Operand b) { return multiply_add(sum, a, b); }
};

#endif

// Lane j of the result is lane I[j] of a and b laid end to end. Register: Floats or Words, likewise below.
template <int... I, class Register>
inline Register pick(Register a, Register b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, Words{I...});  // GCC 11, still common, lacks the other
#endif
}

// a and b end to end are groups of 2 * kHalf lanes; each group is added up to its half.
template <int kHalf, class Register, int... J>
inline Register halve_groups(Register a, Register b, std::integer_sequence<int, J...>) {
  return pick<(J / kHalf * 2 * kHalf + J % kHalf)...>(a, b) +
         pick<(J / kHalf * 2 * kHalf + J % kHalf + kHalf)...>(a, b);
}

// Lane j of v[0] becomes the sum of the lanes of v[j], for j < kCount <= kLanes; the rest of v is scratch.
// Halving all of them together costs a third of summing one after the other.
template <int kCount, int kHalf = kLanes / 2, class Register>
inline void sum_lanes(Register* v) {
  if constexpr (kHalf > 0) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    constexpr int kPairs = (kCount + 1) / 2;
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      v[i] = halve_groups<kHalf>(v[2 * i], v[2 * i + 1 < kCount ? 2 * i + 1 : 2 * i], lanes);
    }
    sum_lanes<kPairs, kHalf / 2>(v);
  }
}

}  // namespace dlinfer
