// Facts about this processor that the compiler's macros do not tell.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstring>
#endif

namespace dlinfer {

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

inline Leaf cpuid(unsigned leaf, unsigned part = 0) {
  Leaf found;
  if (!__get_cpuid_count(leaf, part, &found.a, &found.b, &found.c, &found.d)) return {};
  return found;
}

#endif

// Designs that are told apart here. Later ones of the same maker are taken for the last.
enum class Design { kOther, kZen4, kZen5 };

inline Design design() {
#if defined(__x86_64__)
  static const Design known = [] {
    constexpr unsigned kZen3And4 = 0x19, kZen5 = 0x1a;
    const Leaf name = cpuid(0), version = cpuid(1);
    char vendor[12];
    std::memcpy(vendor, &name.b, 4), std::memcpy(vendor + 4, &name.d, 4), std::memcpy(vendor + 8, &name.c, 4);
    if (std::memcmp(vendor, "AuthenticAMD", 12) != 0) return Design::kOther;
    const unsigned family = (version.a >> 8 & 0xf) + ((version.a >> 8 & 0xf) == 0xf ? version.a >> 20 & 0xff : 0);
    if (family >= kZen5) return Design::kZen5;
    const bool has_avx512 = cpuid(7).b >> 16 & 1;
    return family == kZen3And4 && has_avx512 ? Design::kZen4 : Design::kOther;
  }();
  return known;
#else
  return Design::kOther;
#endif
}

inline bool is_zen5_or_later() { return design() == Design::kZen5; }

// Prefetching of memory that is read in order: how many bytes ahead, and into which cache. The numbers of caches are
// __builtin_prefetch's: 3 is the first level, 2 the second.
struct Hints {
  int64_t ahead;
  int nearness;
};

template <Hints kHints>
inline void fetch(const void* line) {
  constexpr int kNearness = kHints.nearness;  // unoptimized, a member of it is no constant to GCC
  __builtin_prefetch(static_cast<const char*>(line) + kHints.ahead, 0, kNearness);
}

// Instructions without which torch's products of a dtype are slow: AVX512-BF16 for bfloat16, and for float16 AVX512-FP16
// or AVX-NE-CONVERT.
enum class Instructions { kBFloat16, kHalf };

// Whether this processor's instructions are known here, and it lacks those.
inline bool lacks_for_torch(Instructions which) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl");
  static const Leaf more = cpuid(7, 1);
  static const bool bfloat16 = avx512 && more.a >> 5 & 1;
  static const bool half = (avx512 && cpuid(7).d >> 23 & 1) || more.d >> 5 & 1;
  return which == Instructions::kBFloat16 ? !bfloat16 : !half;
#else
  (void)which;
  return false;
#endif
}

}  // namespace dlinfer
