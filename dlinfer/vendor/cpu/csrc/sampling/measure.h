// How many numbers of a row are at or above each of a few thresholds, and how much they weigh: exp(number - largest).
#pragma once

#include <array>
#include <vector>

#include "sampling/row.h"
#include "threads/team.h"

namespace dlinfer::sampling {

constexpr int kSteps = 8;

struct Amount {
  int64_t count = 0;
  double weight = 0;

  Amount& operator+=(const Amount& other) {
    count += other.count;
    weight += other.weight;
    return *this;
  }
};

using Thresholds = std::array<float, kSteps>;  // the highest first
using Amounts = std::array<Amount, kSteps>;    // at or above each

// Groups of blocks that are worth another thread.
constexpr int64_t kMeasuredGroups = 4;

inline float weight_of(float value, float largest) { return exp_of_negative(all_lanes(value - largest))[0]; }

// Adds a block's amounts. Roofline: read once, 2 to 4 bytes a number, from a cache, which holds it since the search
// for its largest number. exp takes some 20 instructions for kLanes numbers. Each threshold at or below `top` takes
// another four, and most blocks have few.
template <class T>
void measure_block(const T* block, int64_t size, float top, float largest, const Thresholds& at, Amounts& amounts) {
  int first = 0;
  while (first < kSteps && !(at[first] <= top)) ++first;
  if (first == kSteps) return;
  Floats x[kBlock / kLanes], e[kBlock / kLanes];
  const int64_t parts = (size + kLanes - 1) / kLanes;
  for (int64_t i = 0; i < parts; ++i) {
    x[i] = wide_part(block, i * kLanes, size);
    e[i] = exp_of_negative(x[i] - all_lanes(largest));
  }
  for (int step = first; step < kSteps; ++step) {
    const Floats least = all_lanes(at[step]), one = all_lanes(1.0f), none{};
    Floats sums[2]{};
    for (int64_t i = 0; i < parts; ++i) {
      const auto in = x[i] >= least;
      sums[0] = sums[0] + (in ? e[i] : none);
      sums[1] = sums[1] + (in ? one : none);
    }
    sum_lanes<2>(sums);
    amounts[step] += {int64_t(sums[0][1]), double(sums[0][0])};
  }
}

// Group by group, so that the sums do not depend on the assignment to threads.
template <class T>
Amounts measure_group(const Row<T>& row, int64_t group, float largest, const Thresholds& at) {
  Amounts amounts{};
  const int64_t end = std::min(row.blocks(), (group + 1) * kGroup);
  for (int64_t i = group * kGroup; i < end; ++i) {
    measure_block(row.block(i), row.size(i), row.tops[i], largest, at, amounts);
  }
  return amounts;
}

inline Amounts total(const Amounts* groups, int64_t count) {
  Amounts amounts{};
  for (int64_t group = 0; group < count; ++group) {
    for (int step = 0; step < kSteps; ++step) amounts[step] += groups[group][step];
  }
  return amounts;
}

template <class T>
Amounts measure(const Row<T>& row, float largest, const Thresholds& at) {
  std::vector<Amounts> groups(row.groups());
  parallel_for(0, row.groups(), kMeasuredGroups, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) groups[group] = measure_group(row, group, largest, at);
  });
  return total(groups.data(), row.groups());
}

}  // namespace dlinfer::sampling
