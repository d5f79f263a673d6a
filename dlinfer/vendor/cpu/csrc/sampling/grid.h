// The numbers that a dtype has, as float32: thresholds between two of them would divide nothing.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/lanes.h"

namespace dlinfer::sampling {

template <class T>
struct Grid {
  static constexpr float lowest() {
    if constexpr (std::is_same_v<T, Half>) return -65504.0f;
    if constexpr (std::is_same_v<T, BFloat16>) return -0x1.fep127f;
    return std::numeric_limits<float>::lowest();
  }

  // One of the two around a number, or the lowest that is finite.
  static float nearest(double number) { return std::max(float(T(float(number))), lowest()); }

  // The next ones of a finite number on the grid.
  static float below(float number) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    const T given = T(number);
    Bits bits;
    std::memcpy(&bits, &given, sizeof bits);
    if (number > 0) {
      --bits;
    } else if (number < 0) {
      ++bits;
    } else {
      bits = Bits((Bits(1) << (8 * sizeof(T) - 1)) + 1);
    }
    T next;
    std::memcpy(&next, &bits, sizeof next);
    return float(next);
  }
  static float above(float number) { return -below(-number); }
};

}  // namespace dlinfer::sampling
