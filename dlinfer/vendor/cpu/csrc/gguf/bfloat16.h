// GGUF's blocks as bfloat16, by instructions for it. It rounds the results of blocks.h. A subnormal result
// becomes zero, as the dot instruction takes it.
//
// A number of 4 or 5 bits is one of 16 or 32 values that its group can have. They are computed once for the group, and
// one instruction then picks 32 of them. Of 6 and 8 bits each number is scaled.
//
// Roofline: 32 numbers take 7 to 12 operations on registers of 512 bits, and a core of Zen 5 does two to four of them in
// a cycle. So 4-bit blocks, 18 bytes, are unpacked at about the speed that memory brings them.
#pragma once

#include "gguf/blocks.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define DLINFER_HAS_PICKED_BLOCKS 1

namespace dlinfer::gguf {

using Shorts = uint16_t __attribute__((vector_size(64)));
constexpr int kShorts = 32;

// bfloat16 of two registers, the first in the lower half.
inline Shorts narrowed(Floats first, Floats second) {
  return (Shorts)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// For each lane the value of the table that its lower five bits name.
inline Shorts picked(Shorts table, Shorts codes) {
  return (Shorts)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table);
}

// 32 bytes, each in a lane.
inline Shorts codes(const uint8_t* from) {
  using Bytes = uint8_t __attribute__((vector_size(32)));
  return (Shorts)_mm512_cvtepu8_epi16((__m256i)load_as<Bytes>(from));
}

// The 4-bit numbers of 16 bytes: first all lower halves, then the upper halves. The lower four bits of each lane.
inline Shorts nibbles(const uint8_t* from) {
  using Bytes = uint8_t __attribute__((vector_size(16)));
  Shorts place{};
  for (int lane = 16; lane < kShorts; ++lane) place[lane] = 4;
  return (Shorts)_mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256((__m128i)load_as<Bytes>(from))) >> place;
}

// 16 in the lanes whose bit is set.
inline Shorts fifth_bits(const uint8_t* from) {
  uint32_t all;
  std::memcpy(&all, from, sizeof all);
  Shorts half{}, place{};
  for (int lane = 0; lane < kShorts; ++lane) half[lane] = lane / 16, place[lane] = lane % 16;
  return ((Shorts)_mm512_permutexvar_epi16((__m512i)half, (__m512i)(Words{} + all)) >> place & 1) << 4;
}

// The numbers from `first` on, one in each lane.
inline Floats numbers_from(float first) {
  Floats numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = float(lane);
  return numbers + first;
}

inline void store(BFloat16* to, Shorts numbers) { std::memcpy(to, &numbers, sizeof numbers); }

template <class Block>
struct Picked;  // with unpack(from, to) for the blocks that have it

template <>
struct Picked<Q4_0> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const Floats values = all_lanes(half(from)) * numbers_from(-8);
    store(to, picked(narrowed(values, values), nibbles(from + 2)));
  }
};

template <>
struct Picked<Q4_1> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const Floats values = scaled(all_lanes(half(from)), numbers_from(0), all_lanes(half(from + 2)));
    store(to, picked(narrowed(values, values), nibbles(from + 4)));
  }
};

template <>
struct Picked<Q5_0> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const Floats scale = all_lanes(half(from));
    const Shorts table = narrowed(scale * numbers_from(-16), scale * numbers_from(0));
    store(to, picked(table, nibbles(from + 6) & 15 | fifth_bits(from + 2)));
  }
};

template <>
struct Picked<Q5_1> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const Floats scale = all_lanes(half(from)), least = all_lanes(half(from + 2));
    const Shorts table = narrowed(scaled(scale, numbers_from(0), least), scaled(scale, numbers_from(16), least));
    store(to, picked(table, nibbles(from + 8) & 15 | fifth_bits(from + 4)));
  }
};

template <>
struct Picked<Q8_0> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const Floats scale = all_lanes(half(from));
    const auto values = [&](const uint8_t* some) { return scale * signed_bytes(some); };
    store(to, narrowed(values(from + 2), values(from + 18)));
  }
};

// As blocks.h's Groups, all at once.
struct GroupLanes {
  explicit GroupLanes(const uint8_t* from) {
    uint32_t lower, minima, both;
    std::memcpy(&lower, from + 4, 4), std::memcpy(&minima, from + 8, 4), std::memcpy(&both, from + 12, 4);
    const uint32_t upper = (both & 0x0f0f0f0fu) | (lower >> 2 & 0x30303030u);
    const uint32_t upper_minima = (both >> 4 & 0x0f0f0f0fu) | (minima >> 2 & 0x30303030u);
    // Put together in registers: to read what was just written in smaller parts would wait for the cache.
    using Pair = uint64_t __attribute__((vector_size(16)));
    const Pair packed{(lower & 0x3f3f3f3fu) | uint64_t(upper) << 32,
                      (minima & 0x3f3f3f3fu) | uint64_t(upper_minima) << 32};
    const Floats numbers = floats((Words)_mm512_cvtepu8_epi32((__m128i)packed));
    uint32_t halves;
    std::memcpy(&halves, from, sizeof halves);
    Words which{};
    Floats sign;
    for (int lane = 0; lane < kLanes; ++lane) which[lane] = lane / 8, sign[lane] = lane < 8 ? 1 : -1;
    const __m512 factors = _mm512_cvtph_ps(_mm256_set1_epi32(halves));
    narrow(scale, by_itself(sign * (Floats)_mm512_permutexvar_ps((__m512i)which, factors) * numbers));
  }
  float scale[16];
  const float* least = scale + 8;
};

template <>
struct Picked<Q4_K> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const GroupLanes groups(from);
    const Floats numbers = numbers_from(0);
#pragma GCC unroll 4
    for (int g = 0; g < 8; g += 2) {
      const Shorts pairs = codes(from + 16 + 16 * g);
      const auto table = [&](int group) {
        // The values stand there twice, so that the fifth bit of a pair needs no mask.
        const Floats values = scaled(all_lanes(groups.scale[group]), numbers, all_lanes(groups.least[group]));
        return narrowed(values, values);
      };
      store(to + 32 * g, picked(table(g), pairs));
      store(to + 32 * g + 32, picked(table(g + 1), pairs >> 4));
    }
  }
};

template <>
struct Picked<Q5_K> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    const GroupLanes groups(from);
    const Floats numbers = numbers_from(0), more = numbers_from(16);
    const Shorts fifths = codes(from + 16);
    const auto put = [&](int group, Shorts code) __attribute__((always_inline)) {
      const Floats scale = all_lanes(groups.scale[group]), least = all_lanes(groups.least[group]);
      const Shorts fifth = group < 4 ? fifths << (4 - group) : fifths >> (group - 4);
      store(to + 32 * group, picked(narrowed(scaled(scale, numbers, least), scaled(scale, more, least)),
                                    code & 15 | fifth & 16));
    };
#pragma GCC unroll 4
    for (int g = 0; g < 8; g += 2) {
      const Shorts pairs = codes(from + 48 + 16 * g);
      put(g, pairs);
      put(g + 1, pairs >> 4);
    }
  }
};

template <>
struct Picked<Q6_K> {
  static void unpack(const uint8_t* from, BFloat16* to) {
    float scales[16];
    narrow(scales, all_lanes(half(from + 208)) * signed_bytes(from + 192));
    const Floats middle = all_lanes(32);
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const Words upper[2] = {bytes(from + 128 + 32 * part), bytes(from + 144 + 32 * part)};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Floats values[2];
        for (int i = 0; i < 2; ++i) {
          const Words pairs = bytes(from + 64 * part + j % 2 * 32 + 16 * i);
          const Words code = (j < 2 ? pairs & 15 : pairs >> 4) | (j < 2 ? upper[i] << (4 - 2 * j) : upper[i] >> (2 * j - 4)) & 48;
          values[i] = all_lanes(scales[8 * part + 2 * j + i]) * (floats(code) - middle);
        }
        store(to + 128 * part + 32 * j, narrowed(values[0], values[1]));
      }
    }
  }
};

}  // namespace dlinfer::gguf

#endif
