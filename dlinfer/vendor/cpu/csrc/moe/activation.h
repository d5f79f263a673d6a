// The activation between an expert's two products.
#pragma once

#include "common/sigmoid.h"

namespace dlinfer::moe {

// silu(gate) * up; with a `limit`, GPT-OSS's clamped activation. NaN stays NaN.
struct Activation {
  float alpha = 1.0f, limit = 0.0f;  // 0: no limit

  Floats operator()(Floats gate, Floats up) const {
    if (limit == 0.0f) return gate * sigmoid(gate) * up;
    const Floats most = all_lanes(limit), least = -most;
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < least ? least : up;
    return (up + all_lanes(1.0f)) * gate * sigmoid(gate * alpha);
  }
};

}  // namespace dlinfer::moe
