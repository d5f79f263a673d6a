// Exact sums of int8 products by tiles are scaled, rounded and written.
#pragma once

#include "tiles/product.h"

#if defined(DLINFER_HAS_TILES) && defined(__AMX_INT8__)
#define DLINFER_HAS_INT8_TILES 1

#include <algorithm>
#include <cstdint>

#include "common/transpose.h"
#include "eight_bit/int8_scaled.h"

namespace dlinfer::tiles {

// Finishes blocks, the sums of 16 rows of the weight and 16 of x at a time.
template <class T>
class Int8Finish {
 public:
  // to: where the rows of a chunk of x put their numbers.
  explicit Int8Finish(const int8::Result<T>& to) : to_(to) {}

  Rows<Byte> memory(const Block& block) const {
    return {reinterpret_cast<Byte*>(to_.out + block.first * to_.stride + block.panel * kPanel),
            to_.stride * int64_t(sizeof(T)), block.count};
  }
  void begin(const Block& block) {
    block_ = block;
    done_ = 0;
  }
  bool pending() const { return block_.count > 0; }
  void advance() {
    const int64_t width = std::min<int64_t>(kTile, block_.rows - done_), count = std::min<int64_t>(kTile, block_.count);
    Floats by{};
    std::memcpy(&by, to_.by + block_.first, count * sizeof(float));
    by = int8::with_plain_nan(by);
    Floats turned[kTile];
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) turned[i] = int8::as_floats(load_as<Words>(block_.sums + (done_ + i) * kPanel)) * by;
    transpose(turned);
    for (int64_t c = 0; c < count; ++c) int8::put(turned[c], block_.first + c, block_.panel * kPanel + done_, width, to_);
    done_ += kTile;
    if (done_ < block_.rows) return;
    done_ = 0;
    block_.sums += kTile;
    block_.first += count;
    block_.count -= count;
  }

 private:
  const int8::Result<T> to_;
  Block block_{};
  int64_t done_ = 0;  // rows of the weight
};

// A weight of int8, and the product of all rows of x with it.
template <class T>
struct Int8Job {
  Panels panels;
  int8::Result<T> to;

  Int8Finish<T> finish(int64_t, int64_t, int64_t first) const {
    return Int8Finish<T>({to.by + first, to.row_scale, to.bias, to.out + first * to.stride, to.stride});
  }
};

}  // namespace dlinfer::tiles

#endif
