// A square of float32, one row a register, turned in registers.
#pragma once

#include <utility>

#include "common/lanes.h"

namespace dlinfer {

template <int kHalf, int... J>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, J...>) {
  const Floats lower = pick<(J & kHalf ? kLanes + J - kHalf : J)...>(a, b);
  b = pick<(J & kHalf ? kLanes + J : J + kHalf)...>(a, b);
  a = lower;
}

// Lane j of v[i] and lane i of v[j] change places.
template <int kHalf = kLanes / 2>
inline void transpose(Floats* v) {
  if constexpr (kHalf > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (!(i & kHalf)) exchange<kHalf>(v[i], v[i + kHalf], std::make_integer_sequence<int, kLanes>());
    }
    transpose<kHalf / 2>(v);
  }
}

}  // namespace dlinfer
