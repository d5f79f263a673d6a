// One token of a row, drawn by a number: the first place whose share of the weight of all that may be drawn reaches it.
#pragma once

#include <functional>
#include <optional>

#include "sampling/order.h"

namespace dlinfer::sampling {

// The limits of a draw from a row. All say "the first places of the order, up to": so the strictest of them decides.
struct Limits {
  int64_t top_k = 0;  // so many; 0: any number
  float top_p = 1;    // those before which there is at most this share of the weight that top_k leaves
  float min_p = 0;    // those of at least this part of the largest weight

  bool only_largest() const { return top_k == 1 || top_p < 0 || min_p > 1; }
};

// exp of less than this is no normal number: nothing to be drawn lies so far below the largest.
constexpr float kDepth = 87.4f;

// Where the first thresholds lie between the largest number and the lowest that matters, most of them near the former.
constexpr Thresholds kDepths = {1.0f / 128, 1.0f / 64, 1.0f / 32, 1.0f / 16, 3.0f / 32, 1.0f / 8, 1.0f / 4, 1.0f};

// A row on its way: what is known of it before anything is measured.
template <class T>
struct Draw {
  Row<T> row;
  Limits limits;
  float number;                  // of [0, 1)
  Largest largest{};
  std::optional<int64_t> token;  // once it is known
  Thresholds at{};
};

// A row's largest number, and thresholds.
template <class T>
void prepare(Draw<T>& draw) {
  draw.largest = largest_of(draw.row);
  // Where torch's softmax is NaN, its sums reach no number, and the first place is taken.
  if (!std::isfinite(draw.largest.value) || draw.limits.only_largest()) {
    draw.token = draw.largest.token;
    return;
  }
  float low = std::max(draw.largest.value - kDepth, std::numeric_limits<float>::lowest());
  if (draw.limits.top_k > 0 && draw.limits.top_k <= draw.row.blocks()) {
    // So many blocks hold a number that is as large as the smallest of their largest.
    std::vector<float> tops(draw.row.tops, draw.row.tops + draw.row.blocks());
    const auto last = tops.begin() + (draw.limits.top_k - 1);
    std::nth_element(tops.begin(), last, tops.end(), std::greater<float>());
    low = std::max(low, *last);
  }
  for (int i = 0; i < kSteps; ++i) {
    draw.at[i] = std::max(low, float(draw.largest.value - (double(draw.largest.value) - low) * kDepths[i]));
  }
  draw.at.back() = low;
}

// The token, of the amounts at the row's thresholds.
template <class T>
int64_t drawn(const Draw<T>& draw, const Amounts& amounts) {
  const Limits& limits = draw.limits;
  Order<T> order(draw.row, draw.largest.value, draw.at, amounts);
  Amount kept = order.all();
  std::optional<Place> last;  // that may be drawn; none where all may be
  const auto end_at = [&](const Place& place) {
    if (last && last->before(place)) return;
    last = place;
    kept = place.through;
  };
  if (limits.top_k > 0 && limits.top_k < kept.count) {
    end_at(order.find([&](const Amount& through) { return through.count >= limits.top_k; }));
  }
  if (limits.top_p < 1) {
    const double share = double(limits.top_p) * kept.weight;
    end_at(order.find([&](const Amount& through) { return through.weight > share; }));
  }
  if (limits.min_p > 0) {
    Thresholds at;
    at.fill(std::clamp(draw.largest.value + std::log(limits.min_p), draw.at.back(), draw.largest.value));
    const int64_t count = measure(draw.row, draw.largest.value, at).back().count;
    end_at(order.find([&](const Amount& through) { return through.count >= count; }));
  }
  const double share = double(draw.number) * kept.weight;
  const Place place = order.find([&](const Amount& through) { return through.weight >= share; });
  return last && last->before(place) ? last->token : place.token;
}

}  // namespace dlinfer::sampling
