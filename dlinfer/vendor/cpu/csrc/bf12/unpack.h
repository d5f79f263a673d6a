// Rows of a packed matrix as bfloat16.
//
// Roofline: 128 numbers take 13 operations on registers of 512 bits, which a core of Zen 5 does four times as fast as
// memory brings the 192 bytes.
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "bf12/matrix.h"
#include "common/lanes.h"

namespace dlinfer::bf12 {

using Shorts = uint16_t __attribute__((vector_size(sizeof(Floats))));
constexpr int kShorts = sizeof(Shorts) / sizeof(uint16_t);

// The exponents that codes name, in their place of a bfloat16.
class Exponents {
 public:
#if defined(__AVX512BW__)
  // The instruction reads the lower five bits of an index, and a code has four: the table stands there twice.
  explicit Exponents(int base) {
    uint16_t table[kShorts];
    for (int i = 0; i < kShorts; ++i) table[i] = i % 16 ? (base + i % 16) << 7 : 0;
    table_ = load_as<Shorts>(table);
  }
  // codes: the lower four bits of each lane.
  Shorts operator()(Shorts codes) const {
    return (Shorts)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)table_);
  }

 private:
  Shorts table_;
#else
  explicit Exponents(int base) : base_(base) {}
  Shorts operator()(Shorts codes) const {
    codes &= 15;
    return (codes + base_ << 7) & (Shorts)(codes != 0);
  }

 private:
  uint16_t base_;
#endif
};

inline Shorts swap_bytes(Shorts numbers) { return numbers << 8 | numbers >> 8; }

// Some neighbours of the 128 numbers of a row in a group: those from kShorts * part on.
template <int part>
Shorts unpack_part(const uint8_t* from, const Exponents& exponents) {
  constexpr int kQuarter = kGroup / 4, kQuarterOf = part * kShorts / kQuarter, kAt = part * kShorts % kQuarter;
  const Shorts pairs = load_as<Shorts>(from + kQuarterOf / 2 * 2 * kQuarter + 2 * kAt);
  const Shorts codes = load_as<Shorts>(from + 4 * kQuarter + 2 * kAt);
  return (kQuarterOf % 2 ? swap_bytes(pairs) : pairs) & kField | exponents(codes >> 4 * kQuarterOf);
}

// body(std::integral_constant<int, part>) for all parts in their order.
template <class Body>
__attribute__((always_inline)) inline void for_parts(const Body& body) {
  [&]<int... part>(std::integer_sequence<int, part...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, part>()), ...);
  }(std::make_integer_sequence<int, kGroup / kShorts>());
}

inline void unpack_group(const uint8_t* from, const Exponents& exponents, uint16_t* to) {
  for_parts([&](auto part) __attribute__((always_inline)) {
    const Shorts numbers = unpack_part<part>(from, exponents);
    std::memcpy(to + part * kShorts, &numbers, sizeof numbers);
  });
}

// Columns of the rows of a strip, into rows that begin `stride` numbers apart; whole groups are written, so there has to
// be room for them. first: a multiple of kGroup. exceptions: those of the strip from there on; it takes its own.
inline void unpack_strip(const uint8_t* from, const Exponents& exponents, int64_t first, int64_t count,
                         Exceptions& exceptions, uint16_t* to, int64_t stride) {
  for (int64_t at = 0; at < count; at += kGroup) {
#pragma GCC unroll 4
    for (int64_t row = 0; row < kStrip; ++row, from += kGroupBytes) {
      unpack_group(from, exponents, to + row * stride + at);
    }
  }
  for (Exception one; exceptions.next(first + count, one);) to[one.row * stride + one.column - first] = one.bits;
}

}  // namespace dlinfer::bf12
