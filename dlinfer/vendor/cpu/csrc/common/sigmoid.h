// The logistic function of float32 lanes.
#pragma once

#include "common/widen.h"

namespace dlinfer {

// 1 / (1 + exp(-x)), within some units in the last place, from exp of what is not positive, which cannot overflow.
// Below -87.3 it is 0. NaN stays NaN.
inline Floats sigmoid(Floats x) {
  const Floats zero{}, one = all_lanes(1.0f);
  const Floats e = exp_of_negative(x > zero ? -x : x);
  return (x > zero ? one : e) / (one + e);
}

}  // namespace dlinfer
