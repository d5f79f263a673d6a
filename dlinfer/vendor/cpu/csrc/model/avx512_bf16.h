// AVX-512 BF16 and VNNI in software, with all of avx512.h: the level avx512_bf16_model of DLINFER_CPU_ISA.
#pragma once

#include "avx512.h"

namespace dlinfer {
namespace model {

// While it lives, float32 arithmetic is that of the bfloat16 instructions: rounded to the nearest, halves to even, and
// what is below normal numbers is zero, as operand and as result. They neither read nor write MXCSR, so it comes back.
class FlushedArithmetic {
 public:
  FlushedArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(kFlushed); }
  ~FlushedArithmetic() { _mm_setcsr(before_); }
  FlushedArithmetic(const FlushedArithmetic&) = delete;
  FlushedArithmetic& operator=(const FlushedArithmetic&) = delete;

 private:
  static constexpr unsigned kFlushed = 0x9fc0;  // FTZ, DAZ, and no exception ends the process
  unsigned before_;
};

// Written out, so that the compiler does not move them away from the changes of MXCSR.
inline __m256 fused(__m256 sum, __m256 a, __m256 b) {
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}
inline __m256 added(__m256 a, __m256 b) {
  asm volatile("vaddps %1, %0, %0" : "+x"(a) : "x"(b));
  return a;
}

// The lower and the upper number of words of two bfloat16, as float32.
inline __m256 lower(__m256i words) { return (__m256)_mm256_slli_epi32(words, 16); }
inline __m256 upper(__m256i words) { return (__m256)_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000))); }

inline uint16_t bfloat16(float x) {
  const uint32_t word = bits<uint32_t>(x);
  if ((word & 0x7f800000) == 0) return uint16_t(word >> 16 & 0x8000);
  if (std::isnan(x)) return uint16_t(word >> 16 | 0x40);
  return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);  // infinity stays what it is
}

}  // namespace model

// sum + a * b for each two neighbours: first the upper, then the lower product is added, each rounded once.
__attribute__((noinline)) inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  struct Floats {
    __m256 of[2];
  } sums = model::bits<Floats>(sum);
  struct Pairs {
    __m256i of[2];
  } const left = model::bits<Pairs>(a), right = model::bits<Pairs>(b);
  {
    const model::FlushedArithmetic flushed;
    for (int i = 0; i < 2; ++i) {
      sums.of[i] = model::fused(sums.of[i], model::upper(left.of[i]), model::upper(right.of[i]));
      sums.of[i] = model::fused(sums.of[i], model::lower(left.of[i]), model::lower(right.of[i]));
    }
  }
  return model::bits<__m512>(sums);
}

// The numbers of `second`, then those of `first`.
__attribute__((noinline)) inline __m512bh _mm512_cvtne2ps_pbh(__m512 first, __m512 second) {
  uint16_t narrow[32];
  for (int i = 0; i < 16; ++i) {
    narrow[i] = model::bfloat16(second[i]);
    narrow[16 + i] = model::bfloat16(first[i]);
  }
  return model::bits<__m512bh>(narrow);
}

// sum + a * b for each four neighbours. Those of a have no sign.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto sums = (Register<uint32_t>)sum;
  for (int i = 0; i < 4; ++i) {
    const auto left = (Register<uint32_t>)a >> uint32_t(8 * i) & 255u;
    const auto right = (Register<int32_t>)((Register<uint32_t>)b << uint32_t(24 - 8 * i)) >> 24;
    sums += left * (Register<uint32_t>)right;
  }
  return (__m512i)sums;
}

}  // namespace dlinfer

#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
