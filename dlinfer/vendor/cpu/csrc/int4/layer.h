// A layer with a weight of 4 bits, and rows of x packed for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "common/store.h"
#include "common/transpose.h"
#include "common/widen.h"
#include "int4/floats.h"
#include "int4/int4.h"
#include "int4/pairs.h"
#include "threads/team.h"

namespace dlinfer::int4 {

// The dtype of floats other than x: one of three.
struct Kind {
  int64_t bytes;
  void (*widen)(const void*, int64_t, int64_t, float*);   // so many numbers, from one on
  void (*narrow)(const float*, int64_t, void*, int64_t);  // so many, to one and those behind it
};

template <class T>
void widen_all(const void* data, int64_t from, int64_t count, float* to) {
  const T* numbers = static_cast<const T*>(data) + from;
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    const Floats wide = widen(numbers + at);
    std::memcpy(to + at, &wide, sizeof wide);
  }
  for (; at < count; ++at) to[at] = float(numbers[at]);
}

template <class T>
void narrow_all(const float* from, int64_t count, void* data, int64_t to) {
  T* numbers = static_cast<T*>(data) + to;
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) store_narrow(numbers + at, load_as<Floats>(from + at), kLanes);
  for (; at < count; ++at) numbers[at] = T(from[at]);
}

template <class T>
constexpr Kind kKind{sizeof(T), widen_all<T>, narrow_all<T>};

constexpr int64_t kWideRow = 2048;  // bytes of a row of the weight, from which on few of them are in a page

struct Layer {
  const uint32_t* words;
  int64_t stride;  // words from a row of the weight to the next; likewise below
  const void* scales;
  int64_t scales_stride;
  Kind scales_kind;
  const uint32_t* zeros;  // null where all are 8
  int64_t zeros_stride;
  const float* bias;  // or null
  int64_t in, out, group;
  int64_t strip_rows = kStripRows;

  int64_t words_of_a_row() const { return out / kNibbles; }
  int64_t blocks() const { return (words_of_a_row() + kLanes - 1) / kLanes; }
  bool has_wide_rows() const { return words_of_a_row() * int64_t(sizeof(uint32_t)) >= kWideRow; }
  int64_t strips_of_a_group() const { return (group + strip_rows - 1) / strip_rows; }
  int64_t strips() const {
    return in ? ((in - 1) / group) * strips_of_a_group() + ((in - 1) % group) / strip_rows + 1 : 0;
  }
  int64_t words_of(int64_t block) const { return std::min<int64_t>(kLanes, words_of_a_row() - block * kLanes); }
};

// The rows of the weight that a strip has, and its group.
struct Span {
  int64_t group, begin, depth;
};

inline Span span_of(const Layer& layer, int64_t strip) {
  const int64_t group = strip / layer.strips_of_a_group();
  const int64_t begin = group * layer.group + strip % layer.strips_of_a_group() * layer.strip_rows;
  const int64_t end = std::min({begin + layer.strip_rows, (group + 1) * layer.group, layer.in});
  return {group, begin, end - begin};
}

// Memory that nobody has written, from the beginning of a register on.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(new char[bytes + sizeof(Floats)]) {}
  template <class T>
  T* as() const {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return reinterpret_cast<T*>((address + sizeof(Floats) - 1) / sizeof(Floats) * sizeof(Floats));
  }

 private:
  std::unique_ptr<char[]> memory_;
};

template <class T>
float sum_of(const T* from, int64_t count) {
  Floats lanes{};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) lanes = lanes + widen(from + at);
  if (at < count) lanes = lanes + widen_part(from + at, count - at);
  sum_lanes<1>(&lanes);
  return lanes[0];
}

// Rows of x, `rows` of them side by side for each row of the weight, or each two of them; and the sums of each row over
// each strip.
template <class Tiles>
class Inputs {
  using X = typename Tiles::X;

 public:
  Inputs(const Layer& layer, int64_t count)
      : count(count),
        strips(layer.strips()),
        words_((layer.in + Tiles::kRowsOfX - 1) / Tiles::kRowsOfX),
        numbers_((count * words_ + kLanes) * int64_t(sizeof(X))),
        sums_(count * strips * int64_t(sizeof(float))) {
    const int64_t passes = std::max<int64_t>((count + kMostRows - 1) / kMostRows, 1);
    rows = std::max<int64_t>((count + passes - 1) / passes, 1);
  }

  int64_t rows_at(int64_t first) const { return std::min(rows, count - first); }
  const X* at(int64_t first, int64_t column) const {
    return numbers_.template as<X>() + first * words_ + column / Tiles::kRowsOfX * rows_at(first);
  }
  const float* sums(int64_t row, int64_t strip) const { return sums_.template as<float>() + row * strips + strip; }
  const float* scales(int64_t, int64_t) const { return nullptr; }  // they are as they were

  template <class T>
  void pack(const T* data, int64_t stride, const Layer& layer) {
    const int64_t grain = std::max<int64_t>(kPackedRows / rows, 1);
    parallel_for(0, (count + rows - 1) / rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = begin * rows; first < std::min(end * rows, count); first += rows) {
        const T* const from = data + first * stride;
        for (int64_t m = 0; m < rows_at(first); ++m) add_up(from + m * stride, layer, sums_.template as<float>() + (first + m) * strips);
        side_by_side(from, stride, rows_at(first), layer.in, numbers_.template as<X>() + first * words_);
      }
    });
  }

  int64_t count, strips, rows;

 private:
  static constexpr int64_t kPackedRows = 64;  // fewer are packed before another thread has begun

  template <class T>
  void add_up(const T* row, const Layer& layer, float* sums) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      const Span span = span_of(layer, strip);
      sums[strip] = sum_of(row + span.begin, span.depth);
    }
  }

  // Number `at` of a row, which has `in` numbers.
  template <class T>
  static X one(const T* row, int64_t at, int64_t in) {
    if constexpr (std::is_same_v<X, float>) {
      return float(row[at]);
    } else {
      uint16_t pair[2]{};
      std::memcpy(pair, row + 2 * at, (2 * at + 1 < in ? 2 : 1) * sizeof(uint16_t));
      return pair[0] | uint32_t(pair[1]) << 16;
    }
  }

  // The same for kLanes of them that exist.
  template <class T>
  static Floats some(const T* row, int64_t at) {
    if constexpr (std::is_same_v<X, float>) {
      return widen(row + at);
    } else {
      return load_as<Floats>(row + 2 * at);
    }
  }

  template <class T>
  static void side_by_side(const T* from, int64_t stride, int64_t rows, int64_t in, X* to) {
    const int64_t words = (in + Tiles::kRowsOfX - 1) / Tiles::kRowsOfX, whole = in / Tiles::kRowsOfX;
    int64_t at = 0;
    if (rows == 1) {
      for (; at + kLanes <= whole; at += kLanes) {
        const Floats numbers = some(from, at);
        std::memcpy(to + at, &numbers, sizeof numbers);
      }
    } else if (rows <= kLanes) {
      // A register that is stored writes beyond its row, where the next is stored later.
      for (; (at + kLanes) * rows + kLanes <= words * rows && at + kLanes <= whole; at += kLanes) {
        Floats numbers[kLanes]{};
        for (int64_t m = 0; m < rows; ++m) numbers[m] = some(from + m * stride, at);
        transpose(numbers);
        for (int64_t j = 0; j < kLanes; ++j) std::memcpy(to + (at + j) * rows, numbers + j, sizeof(Floats));
      }
    }
    for (; at < words; ++at) {
      for (int64_t m = 0; m < rows; ++m) to[at * rows + m] = one(from + m * stride, at, in);
    }
  }

  int64_t words_;
  Scratch numbers_, sums_;
};

}  // namespace dlinfer::int4
