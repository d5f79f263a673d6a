// A linear layer of twice as many features and silu_and_mul behind it, for up to as many rows as few_rows.h takes.
//
// A thread computes some features of both halves, and their gated product, before it goes on. So the layer's result,
// which for a prompt is twice the size of this one's, is never in memory. Both are rounded where the two kernels apart
// round, so the bits are theirs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/narrow.h"
#include "common/sigmoid.h"
#include "common/widen.h"
#include "linear/few_rows.h"
#include "linear/panels.h"

namespace dlinfer {

// Blocks of one half that follow each other before the other half's: as many as there is room for the sums of. Of few
// rows of x the weight is what takes the time, and memory gives two long streams sooner than many that change places.
constexpr int64_t gated_stretch(int64_t inputs) { return std::max<int64_t>(kPanelInputs / inputs, 1); }

// out: [x.count, features], weight: of 2 * features rows, and a block may begin at the middle one; bias: as long or
// null.
template <class Weight, class T = typename Weight::Type>
void multiply_gated(const Weight& weight, Rows<const T> x, int64_t columns, const T* bias, T* out) {
  const int64_t features = weight.rows() / 2, rows = block_rows<T>(columns);
  const auto count = [&](int64_t block) { return std::min(rows, features - block * rows); };
  const auto row = [&](int half, int64_t block) { return half * features + block * rows; };
  // Some rows of a block's sums, with what is added to each, rounded.
  const auto value = [&](const float* sums, int half, int64_t first, int64_t lanes) {
    Floats added{};
    if (bias) {
      const T* const from = bias + half * features + first;
      added = lanes == kLanes ? widen(from) : widen_part(from, lanes);
    }
    return rounded<T>(load_as<Floats>(sums) + added);
  };

  const auto take = [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const T> some{x.data + c * x.stride, x.stride, inputs};
    const int64_t longest = gated_stretch(inputs), block_size = inputs * kBlockRows;
    float sums[2][kPanelInputs * kBlockRows];
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(first + longest, end);
      for (int half : {0, 1}) {
        const void* const other = half == 0 ? weight.at(row(1, first)) : last < end ? weight.at(row(0, last)) : nullptr;
        for (int64_t i = first; i < last; ++i) {
          weight.block_sums(row(half, i), count(i), some, i + 1 < last ? weight.at(row(half, i + 1)) : other,
                            sums[half] + (i - first) * block_size);
        }
      }
      for (int64_t input = 0; input < inputs; ++input) {
        for (int64_t i = first; i < last; ++i) {
          T* const to = out + (c + input) * features + i * rows;
          const int64_t from = (i - first) * block_size + input * kBlockRows;
          for (int64_t r = 0; r < count(i); r += kLanes) {
            const int64_t lanes = std::min<int64_t>(count(i) - r, kLanes);
            const Floats gate = value(sums[0] + from + r, 0, i * rows + r, lanes);
            const Floats result = rounded<T>(gate * sigmoid(gate)) * value(sums[1] + from + r, 1, i * rows + r, lanes);
            lanes == kLanes ? narrow(to + r, result) : narrow_part(to + r, result, lanes);
          }
        }
      }
    }
  };
  for_panels(x.count, (features + rows - 1) / rows, weight.bytes(2 * rows), take);
}

}  // namespace dlinfer
