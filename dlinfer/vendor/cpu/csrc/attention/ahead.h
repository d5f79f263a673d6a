// Prefetches rows of the cache, line by line, while other rows are in use.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dlinfer::attention {

constexpr int64_t kLine = 64;  // bytes that a processor reads at once

template <class T>
class Ahead {
 public:
  Ahead() = default;
  // Spreads the prefetches over about this many steps.
  Ahead(const T* const* rows, int64_t count, int64_t numbers, int64_t steps)
      : rows_(rows), end_(rows + count), bytes_(numbers * int64_t(sizeof(T))) {
    const int64_t lines = count * ((bytes_ + kLine - 1) / kLine);
    lines_ = (lines + steps - 1) / std::max<int64_t>(steps, 1);
  }

  inline __attribute__((always_inline)) void step() {
    for (int64_t i = lines_; i > 0 && rows_ != end_; --i) {
      __builtin_prefetch(reinterpret_cast<const char*>(*rows_) + at_, 0, 2);  // not into the first level
      at_ += kLine;
      if (at_ >= bytes_) at_ = 0, ++rows_;
    }
  }

 private:
  const T *const *rows_ = nullptr, *const *end_ = nullptr;
  int64_t bytes_ = 0, lines_ = 0, at_ = 0;
};

}  // namespace dlinfer::attention
