// A row's places as if it were sorted: the largest number first and, of equal ones, the lower token first.
//
// A place is looked for by how many numbers, or how much weight, there is up to it. Thresholds tell between which two
// of them it lies, bins divide what lies between those, until so few numbers remain that they are sorted, or all are
// equal.
#pragma once

#include <vector>

#include "sampling/bins.h"
#include "sampling/measure.h"

namespace dlinfer::sampling {

// Numbers that are sorted rather than divided once more.
constexpr int64_t kFew = 512;

struct Place {
  float value;
  int64_t token;
  Amount through;  // up to this place, itself among them

  bool before(const Place& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

template <class T>
class Order {
 public:
  // largest: finite, of a row without NaN. `at` and `amounts` belong together; what is below the last of them is none.
  Order(const Row<T>& row, float largest, const Thresholds& at, const Amounts& amounts)
      : row_(row), largest_(largest), at_(at), amounts_(amounts) {}

  Amount all() const { return amounts_.back(); }

  // The first place that makes reached(amount through it) true; the last place if there is none.
  template <class Reached>
  Place find(const Reached& reached) {
    Run run = between_thresholds(reached);
    while (run.count > kFew) {
      if (run.span.low == run.span.high) return among_equal(run, reached);
      const Run part = in_one_bin(run, reached);
      // So near to each other that no float32 tells where in between they are.
      if (part.count == run.count && part.span.low == run.span.low && part.span.high == run.span.high) break;
      run = part;
    }
    return among_few(run, reached);
  }

 private:
  // Places one after the other: the numbers of a span.
  struct Run {
    Span span;
    int64_t count;
    Amount before;  // in front of the first of them
  };

  template <class Reached>
  Run between_thresholds(const Reached& reached) const {
    int step = 0;
    while (step < kSteps - 1 && !(amounts_[step].count > 0 && reached(amounts_[step]))) ++step;
    while (step > 0 && amounts_[step - 1].count == amounts_[step].count) --step;  // past those that add nothing
    if (step == 0) return {{at_[0], largest_}, amounts_[0].count, {}};
    const Amount before = amounts_[step - 1];
    return {{at_[step], std::nextafter(at_[step - 1], -kInfinity)}, amounts_[step].count - before.count, before};
  }

  template <class Reached>
  Run in_one_bin(const Run& run, const Reached& reached) const {
    const Bins bins(run.span);
    const std::vector<Amount> amounts = put_into(bins, row_, largest_);
    int bin = 0;
    Amount before = run.before, through = before;
    for (int i = 0; i < kBins; ++i) {
      if (amounts[i].count == 0) continue;
      bin = i;
      before = through;
      through += amounts[i];
      if (reached(through)) break;
    }
    return {extent(bins, bin, row_), amounts[bin].count, before};
  }

  // Calls each(value, token) for the numbers of a span, in the order of their tokens, till it says that it has enough.
  template <class Each>
  void visit(Span span, const Each& each) const {
    for (int64_t block = 0; block < row_.blocks(); ++block) {
      if (row_.tops[block] < span.low) continue;
      const T* const from = row_.block(block);
      const int64_t size = row_.size(block);
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats x = wide_part(from, i, size);
        const Words in = span.holds(x);
        if (!any(in)) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
          if (in[lane] && each(x[lane], block * kBlock + i + lane)) return;
        }
      }
    }
  }

  template <class Reached>
  Place among_few(const Run& run, const Reached& reached) {
    if (few_.empty() || few_[0].through.count != run.before.count + 1 || int64_t(few_.size()) != run.count) {
      sort_few(run);
    }
    for (const Place& place : few_) {
      if (reached(place.through)) return place;
    }
    return few_.back();
  }

  void sort_few(const Run& run) {
    few_.clear();
    visit(run.span, [&](float value, int64_t token) {
      few_.push_back({value, token, {}});
      return false;
    });
    std::sort(few_.begin(), few_.end(), [](const Place& a, const Place& b) { return a.before(b); });
    Amount through = run.before;
    for (Place& place : few_) {
      through += {1, weight_of(place.value, largest_)};
      place.through = through;
    }
  }

  template <class Reached>
  Place among_equal(const Run& run, const Reached& reached) const {
    const float value = run.span.low;
    const double weight = weight_of(value, largest_);
    const auto through = [&](int64_t nth) {
      return Amount{run.before.count + nth, run.before.weight + double(nth) * weight};
    };
    int64_t first = 1, last = run.count;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (reached(through(middle))) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    int64_t token = -1, left = first;
    visit(run.span, [&](float, int64_t at) {
      token = at;
      return --left == 0;
    });
    return {value, token, through(first)};
  }

  const Row<T>& row_;
  float largest_;
  const Thresholds& at_;
  const Amounts& amounts_;
  std::vector<Place> few_;  // what was sorted last, since the next place is often near
};

}  // namespace dlinfer::sampling
