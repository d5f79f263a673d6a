// AVX-512 (F, BW, DQ, VL) in software, for tests on processors without it: the level avx512_model of DLINFER_CPU_ISA.
//
// Included before all other code (-include). It defines, in namespace dlinfer, those intrinsics that the kernels use.
// Kernels call them by their own names, and the compiler finds these before its own. An intrinsic that is missing here
// does not compile. Each computes its definition in Intel's manual (SDM, volume 2); a test compares all of them with
// a processor that has the instructions, bit by bit. The code is compiled for AVX2, F16C and FMA.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#define DLINFER_MODEL 1

// Some intrinsics are a compiler's macros.
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_insertf32x8
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_set4_epi32
#undef _mm512_setr_epi32
#undef _mm512_setr_epi64
#undef _mm512_setr_ps
#undef _mm512_shuffle_epi32
#undef _mm512_shuffle_f64x2
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32

namespace dlinfer {
namespace model {

template <class T>
struct RegisterOf {
  typedef T type __attribute__((vector_size(64)));
};
template <class T>
using Register = typename RegisterOf<T>::type;
template <class T>
constexpr int kCount = 64 / sizeof(T);

template <class To, class From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The results of f of the lower and of the upper halves. Half: what f takes and gives, of 256 bits.
template <class To, class Half, class F, class... From>
inline To by_halves(F f, const From&... from) {
  struct Two {
    Half of[2];
  };
  return bits<To>(Two{{f(bits<Two>(from).of[0]...), f(bits<Two>(from).of[1]...)}});
}

// A register whose element i is f(i).
template <class T, class F>
inline Register<T> elements(F f) {
  Register<T> all;
  for (int i = 0; i < kCount<T>; ++i) all[i] = f(i);
  return all;
}

// Element i is that of `from` at the place at[i], counted modulo the number of elements.
template <class T, class Place>
__attribute__((noinline)) inline Register<T> permuted(Register<Place> at, Register<T> from) {
  return elements<T>([&](int i) { return from[at[i] % kCount<T>]; });
}
template <class T, class Place>
__attribute__((noinline)) inline Register<T> permuted(Register<T> a, Register<Place> at, Register<T> b) {
  return elements<T>([&](int i) {
    const int place = at[i] % (2 * kCount<T>);
    return place < kCount<T> ? a[place] : b[place - kCount<T>];
  });
}

// Of each 128 bits the lower or upper half of both operands, element after element.
template <class T>
__attribute__((noinline)) inline Register<T> interleaved(Register<T> a, Register<T> b, bool upper) {
  constexpr int kLane = 16 / sizeof(T);
  return elements<T>([&](int i) {
    const int from = i / kLane * kLane + (upper ? kLane / 2 : 0) + i % kLane / 2;
    return i % 2 ? b[from] : a[from];
  });
}

// Memory of an element that the mask leaves out is not read, and not written.
template <class T>
__attribute__((noinline)) inline Register<T> loaded(uint64_t mask, const void* from) {
  Register<T> all{};
  for (int i = 0; i < kCount<T>; ++i) {
    if (mask >> i & 1) {
      T one;
      std::memcpy(&one, static_cast<const char*>(from) + i * sizeof(T), sizeof one);
      all[i] = one;
    }
  }
  return all;
}
template <class T>
__attribute__((noinline)) inline void stored(void* to, uint64_t mask, Register<T> all) {
  for (int i = 0; i < kCount<T>; ++i) {
    const T one = all[i];
    if (mask >> i & 1) std::memcpy(static_cast<char*>(to) + i * sizeof(T), &one, sizeof one);
  }
}

// a * 2**floor(b), rounded once.
inline float scaled(float a, float b) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const bool is_signalling = std::isnan(a) && (bits<uint32_t>(a) & 0x400000) == 0;
  if (std::isnan(b) || is_signalling) return std::numeric_limits<float>::quiet_NaN();
  if (std::isnan(a)) return b == kInfinity ? b : b == -kInfinity ? 0.0f : a;
  if (b == kInfinity) return a == 0 ? std::numeric_limits<float>::quiet_NaN() : std::copysign(b, a);
  if (b == -kInfinity) return std::isinf(a) ? std::numeric_limits<float>::quiet_NaN() : std::copysign(0.0f, a);
  const float whole = std::floor(b);
  return std::ldexp(a, int(whole < -1000 ? -1000 : whole > 1000 ? 1000 : whole));
}

// The rest of a over its whole part, which is rounded down; the rest is rounded down too.
inline float reduced(float a) {
  if (std::isinf(a)) return 0.0f;
  const float whole = std::floor(a), left = a - whole;
  if (left == 0) return -0.0f;
  const float taken = left - a, error = (a - (left - taken)) + (-whole - taken);  // of the subtraction, exactly
  return error < 0 ? std::nextafter(left, -1.0f) : left;
}

}  // namespace model

using model::Register;

// --- numbers in all elements, and one by one

inline __m512 _mm512_set1_ps(float x) { return (__m512)model::elements<float>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi32(int x) { return (__m512i)model::elements<int32_t>([=](int) { return x; }); }
inline __m512i _mm512_set1_epi8(char x) { return (__m512i)model::elements<int8_t>([=](int) { return x; }); }
template <class... T>
inline __m512 _mm512_setr_ps(T... x) {
  return (__m512)Register<float>{float(x)...};
}
template <class... T>
inline __m512i _mm512_setr_epi32(T... x) {
  return (__m512i)Register<int32_t>{int32_t(x)...};
}
template <class... T>
inline __m512i _mm512_setr_epi64(T... x) {
  return (__m512i)Register<int64_t>{int64_t(x)...};
}
template <class... T>
inline __m512i _mm512_set_epi16(T... x) {  // the last first
  const int16_t all[] = {int16_t(x)...};
  return (__m512i)model::elements<int16_t>([&](int i) { return all[31 - i]; });
}
inline __m512i _mm512_set4_epi32(int d, int c, int b, int a) {
  const int all[] = {a, b, c, d};
  return (__m512i)model::elements<int32_t>([&](int i) { return all[i % 4]; });
}

// --- memory

inline __m512i _mm512_loadu_si512(const void* from) { return (__m512i)model::loaded<int8_t>(~uint64_t(0), from); }
inline __m512i _mm512_load_si512(const void* from) { return _mm512_loadu_si512(from); }
inline __m512d _mm512_loadu_pd(const void* from) { return (__m512d)_mm512_loadu_si512(from); }
inline void _mm512_storeu_ps(void* to, __m512 x) { std::memcpy(to, &x, sizeof x); }
inline void _mm512_store_ps(void* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void _mm512_storeu_pd(void* to, __m512d x) { std::memcpy(to, &x, sizeof x); }
inline __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) {
  return (__m512i)model::loaded<int8_t>(mask, from);
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return (__m512i)model::loaded<int16_t>(mask, from);
}
inline __m512i _mm512_maskz_loadu_epi32(__mmask16 mask, const void* from) {
  return (__m512i)model::loaded<int32_t>(mask, from);
}
inline void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i x) {
  model::stored<int16_t>(to, mask, (Register<int16_t>)x);
}

// --- arithmetic of whole numbers

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((Register<uint32_t>)a + (Register<uint32_t>)b); }
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return (__m512i)((Register<uint32_t>)a - (Register<uint32_t>)b); }
inline __m512i _mm512_srai_epi32(__m512i a, int bits) { return (__m512i)((Register<int32_t>)a >> bits); }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  return model::by_halves<__m512i, __m256i>([](__m256i x, __m256i y) { return _mm256_max_epu32(x, y); }, a, b);
}
inline __m512i _mm512_srl_epi16(__m512i x, __m128i by) {
  return model::by_halves<__m512i, __m256i>([=](__m256i half) { return _mm256_srl_epi16(half, by); }, x);
}
inline __m512i _mm512_srli_epi16(__m512i x, int by) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(by)); }
inline __m512i _mm512_srli_epi32(__m512i x, int by) {
  return model::by_halves<__m512i, __m256i>([=](__m256i half) { return _mm256_srl_epi32(half, _mm_cvtsi32_si128(by)); },
                                            x);
}
inline __m512i _mm512_srlv_epi32(__m512i x, __m512i by) {
  return model::by_halves<__m512i, __m256i>([](__m256i a, __m256i b) { return _mm256_srlv_epi32(a, b); }, x, by);
}
inline int _mm512_reduce_add_epi32(__m512i x) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((Register<uint32_t>)x)[i];
  return int(sum);
}
inline unsigned _mm512_reduce_max_epu32(__m512i x) {
  uint32_t most = 0;
  for (int i = 0; i < 16; ++i) most = ((Register<uint32_t>)x)[i] > most ? ((Register<uint32_t>)x)[i] : most;
  return most;
}
inline __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= unsigned(((Register<uint32_t>)(a & b))[i] != 0) << i;
  return __mmask16(mask);
}

// --- arithmetic of float32

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return model::by_halves<__m512, __m256>([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a, b, c);
}
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return model::by_halves<__m512, __m256>([](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, a, b);
}
// To the nearest whole number, halves to even: that is all that the kernels ask for.
inline __m512 _mm512_roundscale_ps(__m512 x, int how) {
  if (how != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  return model::by_halves<__m512, __m256>([](__m256 half) { return _mm256_round_ps(half, _MM_FROUND_TO_NEAREST_INT); }, x);
}
// Down to whole numbers, likewise.
inline __m512 _mm512_reduce_ps(__m512 x, int how) {
  if (how != _MM_FROUND_TO_NEG_INF) __builtin_trap();
  return (__m512)model::elements<float>([&](int i) { return model::reduced(x[i]); });
}
__attribute__((noinline)) inline __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
  return (__m512)model::elements<float>([&](int i) { return model::scaled(a[i], b[i]); });
}

// --- conversions

inline __m512 _mm512_cvtepi32_ps(__m512i x) {
  return (__m512)__builtin_convertvector((Register<int32_t>)x, Register<float>);
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {
  struct Two {
    __m256 of[2];
  } const two = model::bits<Two>(x);
  const __m256i whole[2] = {_mm256_cvtps_epi32(two.of[0]), _mm256_cvtps_epi32(two.of[1])};
  return model::bits<__m512i>(whole);
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  const __m256 wide[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  return model::bits<__m512>(wide);
}
inline __m256i _mm512_cvtps_ph(__m512 x, int how) {
  if (how != _MM_FROUND_TO_NEAREST_INT) __builtin_trap();
  struct Two {
    __m256 of[2];
  } const two = model::bits<Two>(x);
  const __m128i narrow[2] = {_mm256_cvtps_ph(two.of[0], _MM_FROUND_TO_NEAREST_INT),
                             _mm256_cvtps_ph(two.of[1], _MM_FROUND_TO_NEAREST_INT)};
  return model::bits<__m256i>(narrow);
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  const __m256i wide[2] = {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)),
                           _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
  return model::bits<__m512i>(wide);
}
inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
  const __m256i wide[2] = {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
  return model::bits<__m512i>(wide);
}
inline __m512i _mm512_cvtepu8_epi16(__m256i x) {
  const __m256i wide[2] = {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)),
                           _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1))};
  return model::bits<__m512i>(wide);
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
  const __m256i wide[2] = {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
  return model::bits<__m512i>(wide);
}
__attribute__((noinline)) inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  int16_t narrow[16];
  for (int i = 0; i < 16; ++i) narrow[i] = int16_t(((Register<int32_t>)x)[i]);
  return model::bits<__m256i>(narrow);
}
__attribute__((noinline)) inline __m128i _mm512_cvtsepi32_epi8(__m512i x) {  // saturated
  int8_t narrow[16];
  for (int i = 0; i < 16; ++i) {
    const int32_t wide = ((Register<int32_t>)x)[i];
    narrow[i] = int8_t(wide < -128 ? -128 : wide > 127 ? 127 : wide);
  }
  return model::bits<__m128i>(narrow);
}

// --- elements moved

inline __m512 _mm512_castps256_ps512(__m256 x) {
  const __m256 two[2] = {x, _mm256_setzero_ps()};  // what stands above is not defined
  return model::bits<__m512>(two);
}
inline __m256 _mm512_castps512_ps256(__m512 x) {
  __m256 lower;
  std::memcpy(&lower, &x, sizeof lower);
  return lower;
}
inline __m512i _mm512_zextsi256_si512(__m256i x) {
  const __m256i two[2] = {x, _mm256_setzero_si256()};
  return model::bits<__m512i>(two);
}
inline __m256 _mm512_extractf32x8_ps(__m512 x, int which) {
  __m256 half;
  std::memcpy(&half, reinterpret_cast<const char*>(&x) + which * sizeof half, sizeof half);
  return half;
}
inline __m512 _mm512_insertf32x8(__m512 x, __m256 half, int which) {
  std::memcpy(reinterpret_cast<char*>(&x) + which * sizeof half, &half, sizeof half);
  return x;
}
inline __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return (__m512i)model::interleaved<int8_t>((Register<int8_t>)a, (Register<int8_t>)b, false);
}
inline __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return (__m512i)model::interleaved<int8_t>((Register<int8_t>)a, (Register<int8_t>)b, true);
}
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return (__m512i)model::interleaved<int16_t>((Register<int16_t>)a, (Register<int16_t>)b, false);
}
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return (__m512i)model::interleaved<int16_t>((Register<int16_t>)a, (Register<int16_t>)b, true);
}
inline __m512i _mm512_permutexvar_epi16(__m512i at, __m512i x) {
  return (__m512i)model::permuted<int16_t, uint16_t>((Register<uint16_t>)at, (Register<int16_t>)x);
}
inline __m512 _mm512_permutexvar_ps(__m512i at, __m512 x) {
  return (__m512)model::permuted<float, uint32_t>((Register<uint32_t>)at, (Register<float>)x);
}
inline __m512 _mm512_permutex2var_ps(__m512 a, __m512i at, __m512 b) {
  return (__m512)model::permuted<float, uint32_t>((Register<float>)a, (Register<uint32_t>)at, (Register<float>)b);
}
inline __m512d _mm512_permutex2var_pd(__m512d a, __m512i at, __m512d b) {
  return (__m512d)model::permuted<double, uint64_t>((Register<double>)a, (Register<uint64_t>)at, (Register<double>)b);
}
// Of each 128 bits four elements of 32, by two bits of the constant each.
inline __m512i _mm512_shuffle_epi32(__m512i x, int places) {
  return (__m512i)model::elements<int32_t>(
      [&](int i) { return ((Register<int32_t>)x)[i / 4 * 4 + (places >> (2 * (i % 4)) & 3)]; });
}
// 128 bits, two of a's and two of b's, likewise.
inline __m512d _mm512_shuffle_f64x2(__m512d a, __m512d b, int places) {
  return (__m512d)model::elements<double>([&](int i) {
    const int from = (places >> (i / 2 * 2) & 3) * 2 + i % 2;
    return i < 4 ? a[from] : b[from];
  });
}
__attribute__((noinline)) inline __m512 _mm512_maskz_compress_ps(__mmask16 mask, __m512 x) {
  Register<float> all{};
  for (int i = 0, at = 0; i < 16; ++i) {
    if (mask >> i & 1) all[at++] = x[i];
  }
  return (__m512)all;
}

}  // namespace dlinfer

// Its constants have a type of the compiler's, which by itself leads a call to the compiler's own.
#define _mm512_shuffle_epi32(x, places) dlinfer::_mm512_shuffle_epi32(x, places)

// The compiler's built-in functions that kernels call.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512CD__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
