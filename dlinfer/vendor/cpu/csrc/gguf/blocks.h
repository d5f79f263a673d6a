// GGUF's blocks: 32 or 256 neighbours of a row, as numbers of a few bits and their scales. dlinfer/ops/quantised/gguf.py
// says what they stand for. The numbers are computed here in float32 in the same order, and so have the same bits.
#pragma once

#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#include "common/narrow.h"

namespace dlinfer::gguf {

using Ints = int32_t __attribute__((vector_size(sizeof(Floats))));

// kLanes bytes, each in a lane. GCC 12 would move them one by one, where it has no intrinsic.
inline Words bytes(const uint8_t* from) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  const auto some = load_as<Bytes>(from);
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)some);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&some)));
#else
  return __builtin_convertvector(some, Words);
#endif
}

inline Floats floats(Words numbers) { return __builtin_convertvector((Ints)numbers, Floats); }

// kLanes bytes with a sign.
inline Floats signed_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  return __builtin_convertvector((Ints)_mm512_cvtepi8_epi32((__m128i)load_as<Bytes>(from)), Floats);
#else
  return __builtin_convertvector((Ints)(bytes(from) << 24) >> 24, Floats);
#endif
}

inline Words lane_numbers() {
  Words numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// A float16 that may lie at any address.
inline float half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
#if defined(__F16C__) && !defined(DLINFER_MODEL)
  return _cvtsh_ss(bits);
#else
  return float(Half(bits, Half::from_bits()));
#endif
}

// factor * numbers + other, each operation rounded.
inline Floats scaled(Floats factor, Floats numbers, Floats other) { return by_itself(factor * numbers) + other; }

// Each type of blocks has kNumbers, kBytes, and unpack(from, put): for a block it calls put(i, values) with the numbers
// i to i + kLanes, in any order.

struct Q4_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 18;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Floats scale = all_lanes(half(from)), middle = all_lanes(8);
    for (int i = 0; i < 16; i += kLanes) {
      const Words pairs = bytes(from + 2 + i);
      put(i, scale * (floats(pairs & 15) - middle));
      put(16 + i, scale * (floats(pairs >> 4) - middle));
    }
  }
};

struct Q4_1 {
  static constexpr int64_t kNumbers = 32, kBytes = 20;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Floats scale = all_lanes(half(from)), least = all_lanes(half(from + 2));
    for (int i = 0; i < 16; i += kLanes) {
      const Words pairs = bytes(from + 4 + i);
      put(i, scaled(scale, floats(pairs & 15), least));
      put(16 + i, scaled(scale, floats(pairs >> 4), least));
    }
  }
};

// The fifth bits of the numbers i to i + kLanes, in place.
inline Words fifth_bits(const uint8_t* from, int i) {
  uint32_t all;
  std::memcpy(&all, from, sizeof all);
  return (Words{} + all >> (lane_numbers() + uint32_t(i)) & 1) << 4;
}

struct Q5_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 22;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Floats scale = all_lanes(half(from)), middle = all_lanes(16);
    for (int i = 0; i < 16; i += kLanes) {
      const Words pairs = bytes(from + 6 + i);
      put(i, scale * (floats(pairs & 15 | fifth_bits(from + 2, i)) - middle));
      put(16 + i, scale * (floats(pairs >> 4 | fifth_bits(from + 2, 16 + i)) - middle));
    }
  }
};

struct Q5_1 {
  static constexpr int64_t kNumbers = 32, kBytes = 24;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Floats scale = all_lanes(half(from)), least = all_lanes(half(from + 2));
    for (int i = 0; i < 16; i += kLanes) {
      const Words pairs = bytes(from + 8 + i);
      put(i, scaled(scale, floats(pairs & 15 | fifth_bits(from + 4, i)), least));
      put(16 + i, scaled(scale, floats(pairs >> 4 | fifth_bits(from + 4, 16 + i)), least));
    }
  }
};

struct Q8_0 {
  static constexpr int64_t kNumbers = 32, kBytes = 34;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Floats scale = all_lanes(half(from));
    for (int i = 0; i < 32; i += kLanes) put(i, scale * signed_bytes(from + 2 + i));
  }
};

// The scales, and the minima with their sign turned, of the 8 groups of a Q4_K or Q5_K block.
struct Groups {
  explicit Groups(const uint8_t* from) {
    const uint8_t *lower = from + 4, *both = from + 12;
    const float factor = half(from), of_minima = half(from + 2);
    for (int i = 0; i < 4; ++i) {
      scale[i] = factor * float(lower[i] & 63);
      least[i] = -of_minima * float(lower[4 + i] & 63);
      scale[4 + i] = factor * float(both[i] & 15 | lower[i] >> 2 & 48);
      least[4 + i] = -of_minima * float(both[i] >> 4 | lower[4 + i] >> 2 & 48);
    }
  }
  float scale[8], least[8];
};

struct Q4_K {
  static constexpr int64_t kNumbers = 256, kBytes = 144;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Groups groups(from);
    for (int g = 0; g < 8; g += 2) {
      const Floats scale = all_lanes(groups.scale[g]), next_scale = all_lanes(groups.scale[g + 1]);
      const Floats least = all_lanes(groups.least[g]), next_least = all_lanes(groups.least[g + 1]);
      for (int i = 0; i < 32; i += kLanes) {
        const Words pairs = bytes(from + 16 + 16 * g + i);
        put(32 * g + i, scaled(scale, floats(pairs & 15), least));
        put(32 * g + 32 + i, scaled(next_scale, floats(pairs >> 4), next_least));
      }
    }
  }
};

struct Q5_K {
  static constexpr int64_t kNumbers = 256, kBytes = 176;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const Groups groups(from);
    for (int i = 0; i < 32; i += kLanes) {
      const Words fifths = bytes(from + 16 + i);
      for (int g = 0; g < 8; g += 2) {
        const Words pairs = bytes(from + 48 + 16 * g + i);
        put(32 * g + i, scaled(all_lanes(groups.scale[g]), floats(pairs & 15 | (fifths >> g & 1) << 4),
                               all_lanes(groups.least[g])));
        put(32 * g + 32 + i, scaled(all_lanes(groups.scale[g + 1]), floats(pairs >> 4 | (fifths >> (g + 1) & 1) << 4),
                                    all_lanes(groups.least[g + 1])));
      }
    }
  }
};

struct Q6_K {
  static constexpr int64_t kNumbers = 256, kBytes = 210;
  template <class Put>
  static void unpack(const uint8_t* from, const Put& put) {
    const float factor = half(from + 208);
    float scales[16];
    for (int i = 0; i < 16; ++i) scales[i] = factor * float(int8_t(from[192 + i]));
    const Floats middle = all_lanes(32);
    for (int part = 0; part < 2; ++part) {
      for (int i = 0; i < 32; i += kLanes) {
        const Words upper = bytes(from + 128 + 32 * part + i);
        for (int j = 0; j < 4; ++j) {
          const Words pairs = bytes(from + 64 * part + j % 2 * 32 + i);
          const Words lower = j < 2 ? pairs & 15 : pairs >> 4;
          const Floats scale = all_lanes(scales[8 * part + 2 * j + i / 16]);
          put(128 * part + 32 * j + i, scale * (floats(lower | (upper >> 2 * j & 3) << 4) - middle));
        }
      }
    }
  }
};

}  // namespace dlinfer::gguf
