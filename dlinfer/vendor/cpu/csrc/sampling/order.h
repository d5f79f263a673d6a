// A row's places as if it were sorted: the largest number first and, of equal ones, the lower token first.
//
// A place is looked for by how many numbers, or how much weight, there is up to it. Thresholds tell between which two
// of them it lies, further ones between those, until so few numbers remain that they are sorted, or all are equal.
#pragma once

#include <utility>
#include <vector>

#include "sampling/grid.h"
#include "sampling/measure.h"

namespace dlinfer::sampling {

// Numbers that are sorted rather than divided once more.
constexpr int64_t kFew = 256;

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
  // largest: finite, of a row without NaN. `at`, numbers of type T, and `amounts` belong together; what is below the
  // last of them is none.
  Order(const Row<T>& row, float largest, const Thresholds& at, const Amounts& amounts)
      : row_(row), largest_(largest), at_(at), amounts_(amounts) {}

  Amount all() const { return amounts_.back(); }

  // The first place at which reached(amount through it) is true; the last one if there is none such.
  template <class Reached>
  Place find(const Reached& reached) {
    Thresholds at = at_;
    Amounts amounts = amounts_;
    Span span{at_.back(), largest_};
    for (Amount before;;) {
      // Of all the last step that holds something, unless an earlier one reaches.
      int step = kSteps - 1;
      while (step > 0 && amounts[step - 1].count == amounts[step].count) --step;
      for (int i = 0; i < step; ++i) {
        if (amounts[i].count > before.count && reached(amounts[i])) step = i;
      }
      if (step > 0) {
        before = amounts[step - 1];
        span.high = Grid<T>::below(at[step - 1]);
      }
      span.low = at[step];
      const int64_t inside = amounts[step].count - before.count;
      if (inside <= kFew) return among_few(span, before, reached);
      if (span.low == span.high) return among_equal(span.low, inside, before, reached);
      at = divided(span);
      amounts = measure(row_, largest_, at);
    }
  }

 private:
  struct Span {
    float low, high;  // numbers of type T, which both belong to it
  };

  // Evenly, and the last one its lower end. Of two neighbours one is a threshold and the other the lower end.
  static Thresholds divided(Span span) {
    Thresholds at;
    for (int i = 0; i < kSteps; ++i) {
      at[i] = Grid<T>::nearest(span.low + (double(span.high) - span.low) * (kSteps - 1 - i) / kSteps);
    }
    at[0] = std::max(at[0], Grid<T>::above(span.low));
    return at;
  }

  // Calls each(value, token) for the numbers of a span, in the order of their tokens, till it says that it has enough.
  template <class Each>
  void visit(Span span, const Each& each) const {
    const Floats low = all_lanes(span.low), high = all_lanes(span.high);
    for (int64_t block = 0; block < row_.blocks(); ++block) {
      if (row_.tops[block] < span.low) continue;
      const T* const from = row_.block(block);
      const int64_t size = row_.size(block);
      for (int64_t i = 0; i < size; i += kLanes) {
        const Floats x = wide_part(from, i, size);
        const auto in = (Words)(x >= low) & (Words)(x <= high);
        if (!any(in)) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
          if (in[lane] && each(x[lane], block * kBlock + i + lane)) return;
        }
      }
    }
  }

  template <class Reached>
  Place among_few(Span span, Amount before, const Reached& reached) {
    if (few_.empty() || few_span_.low != span.low || few_span_.high != span.high) sort_few(span, before);
    for (const Place& place : few_) {
      if (reached(place.through)) return place;
    }
    return few_.back();
  }

  void sort_few(Span span, Amount before) {
    few_.clear();
    visit(span, [&](float value, int64_t token) {
      few_.push_back({value, token, {}});
      return false;
    });
    std::sort(few_.begin(), few_.end(), [](const Place& a, const Place& b) { return a.before(b); });
    for (Place& place : few_) {
      before += {1, weight_of(place.value, largest_)};
      place.through = before;
    }
    few_span_ = span;
  }

  template <class Reached>
  Place among_equal(float value, int64_t count, Amount before, const Reached& reached) const {
    const double weight = weight_of(value, largest_);
    const auto through = [&](int64_t nth) { return Amount{before.count + nth, before.weight + nth * weight}; };
    int64_t first = 1, last = count;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (reached(through(middle))) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    int64_t token = -1, left = first;
    visit({value, value}, [&](float, int64_t at) {
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
  Span few_span_{};
};

}  // namespace dlinfer::sampling
