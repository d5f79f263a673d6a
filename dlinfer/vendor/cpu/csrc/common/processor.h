// What the macros of the compiler do not tell of the processor that this runs on.
#pragma once

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

// AMD's Zen 5 and what came after it.
inline bool is_zen5_or_later() {
#if defined(__x86_64__)
  static const bool known = [] {
    constexpr unsigned kZen5 = 0x1a;
    const Leaf name = cpuid(0), version = cpuid(1);
    char vendor[12];
    std::memcpy(vendor, &name.b, 4), std::memcpy(vendor + 4, &name.d, 4), std::memcpy(vendor + 8, &name.c, 4);
    const unsigned family = (version.a >> 8 & 0xf) + ((version.a >> 8 & 0xf) == 0xf ? version.a >> 20 & 0xff : 0);
    return std::memcmp(vendor, "AuthenticAMD", 12) == 0 && family >= kZen5;
  }();
  return known;
#else
  return false;
#endif
}

// Whether the processor's own reading ahead does better than hints that say what comes next, where little is computed. It
// does on Zen 5, where eight rows of a weight that are read side by side reach the speed of a plain sum, and hints take a
// tenth of it away. On Zen 4 four rows reach it by hints; eight without were not measured there.
inline bool reads_ahead_itself() { return is_zen5_or_later(); }

// Instructions that torch's library needs for products of a dtype: AVX-512 (BW, DQ, VL) for bfloat16, and for float16
// AVX512-FP16 or AVX-NE-CONVERT.
enum class Instructions { kAvx512, kHalf };

// Whether this is a processor whose instructions are known here, and those are not among them.
inline bool lacks_for_torch(Instructions which) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl");
  static const bool half = (avx512 && cpuid(7).d >> 23 & 1) || cpuid(7, 1).d >> 5 & 1;
  return which == Instructions::kAvx512 ? !avx512 : !half;
#else
  (void)which;
  return false;
#endif
}

}  // namespace dlinfer
