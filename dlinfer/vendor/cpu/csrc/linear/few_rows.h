// x @ weight.T for few rows of x and a weight as torch stores it, [out_features, in_features], at the speed of memory.
//
// A decode step reads each weight once and does little with it, so the time is the time of that reading. Nothing is
// packed: neighbours along in_features are neighbours in memory in both operands, which is what a dot product wants.
// The work is cut four times:
// - block: rows of the weight that one thread handles in a piece. While it computes one, it prefetches the next, evenly
//   over its time, unless x is one row and the processor does better by itself.
// - chunk: columns of a block, so few that the part of x beside them stays in the first-level cache.
// - strip: rows of a chunk that all rows of x meet before the next.
// - tile: a few rows of the weight times a few rows of x, summed in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/lanes.h"
#include "common/processor.h"

namespace dlinfer {

constexpr int kBlockRows = 16;
constexpr int64_t kBlockBytes = 192 << 10;  // two blocks fit into the second-level cache
constexpr int64_t kChunkBytes = 16 << 10;  // half of a first-level cache; the other half is for the weight
constexpr int kStripRows = 8;              // a multiple of every tile's
constexpr int kTileInputs = kAccumulators / 2;

// Sums of a tile: with four rows of the weight, whose loads then serve more rows of x, AVX-512 has room for a few more.
constexpr int kTileSums = kLanes == 16 ? 24 : kAccumulators;

// Rows of the weight in a tile: each load of x should serve several.
constexpr int tile_rows(int inputs) { return 4 * inputs <= kTileSums ? 4 : 2; }

// Rows of x that go into a tile, at most: where one tile does not do for all, as many as let it have four rows.
constexpr int tile_inputs(int64_t inputs) {
  return inputs > kTileInputs && kTileSums > kAccumulators ? kTileSums / 4 : kTileInputs;
}

// Where a tile touches memory ahead of its need: `line`, and `step` bytes on each time.
struct Ahead {
  const char* line;
  int64_t step;
};

// How often a tile touches it for each load of its kRows rows of the weight: never, or at each load. If several tiles
// read the same rows, the caller says how often.
enum class Asks { kNever, kEach, kAsTold };

// Of `rows` such touches those of one pass of several, all of them in turn.
constexpr int64_t touches(int64_t rows, int64_t pass, int64_t passes) {
  return rows / passes + (pass < rows % passes);
}

// to[i] += from[i] for i < kCount, as one operation of the processor.
template <int kCount>
void add_to(float* to, const float* from) {
  typedef float Some __attribute__((vector_size(kCount * sizeof(float))));
  Some a, b;
  std::memcpy(&a, to, sizeof(a)), std::memcpy(&b, from, sizeof(b));
  a += b;
  std::memcpy(to, &a, sizeof(a));
}

// sums[c * kBlockRows + r] += the sum of the lanes of accumulators[c * kRows + r].
template <int kRows, int kInputs>
__attribute__((always_inline)) inline void add_sums(const Floats* accumulators, float* sums) {
  constexpr int kCount = kRows * kInputs;
#pragma GCC unroll 8
  for (int first = 0; first < kCount; first += kLanes) {
    constexpr int kGroup = std::min(kCount, kLanes);
    Floats group[kGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup; ++i) group[i] = first + i < kCount ? accumulators[first + i] : Floats{};
    sum_lanes<kGroup>(group);
    float found[kLanes];
    std::memcpy(found, &group[0], sizeof(found));
    constexpr int kTogether = std::min(kRows, kLanes);  // neighbours in sums
#pragma GCC unroll 16
    for (int i = 0; i < kGroup && first + i < kCount; i += kTogether) {
      add_to<kTogether>(sums + (first + i) / kRows * kBlockRows + (first + i) % kRows, found + i);
    }
  }
}

// GCC would read a float32 anew for each use, as AVX2's multiplications take one operand from memory; reads are what
// a tile has too many of.
template <class Operand>
__attribute__((always_inline)) inline void keep_in_register([[maybe_unused]] Operand& operand) {
#if defined(__AVX__) && !defined(__AVX512F__)
  if constexpr (std::is_same_v<Operand, Floats>) asm("" : "+x"(operand));
#endif
}

// One tile: sums[c * kBlockRows + r] += dot(weight row r, x row c) over `columns`, for r < kRows and c < kInputs.
// told: touches for each load, where kAsks is kAsTold.
template <class T, int kRows, int kInputs, Asks kAsks>
void tile(const T* weight, int64_t weight_stride, const T* x, int64_t x_stride, int64_t columns, Ahead ahead,
          [[maybe_unused]] int64_t told, float* sums) {
  using Op = Operands<T>;
  constexpr int kCount = kRows * kInputs;
  Floats accumulators[kCount]{};

  const auto add = [&](auto load, int64_t at) __attribute__((always_inline)) {
    typename Op::Operand rows[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      rows[r] = load(weight + r * weight_stride + at);
      keep_in_register(rows[r]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < kInputs; ++c) {
      const auto input = load(x + c * x_stride + at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        accumulators[c * kRows + r] = Op::dot(accumulators[c * kRows + r], rows[r], input);
      }
    }
  };

  int64_t at = 0;
  for (; at + Op::kStep <= columns; at += Op::kStep) {
    if constexpr (kAsks == Asks::kEach) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(ahead.line + r * ahead.step, 0, 2);  // not the first level
      ahead.line += kRows * ahead.step;
    } else if constexpr (kAsks == Asks::kAsTold) {
      for (int64_t i = 0; i < told; ++i, ahead.line += ahead.step) __builtin_prefetch(ahead.line, 0, 2);
    }
    add([](const T* from) { return Op::load(from); }, at);
  }
  if (at < columns) add([rest = columns - at](const T* from) { return Op::load(from, rest); }, at);

  add_sums<kRows, kInputs>(accumulators, sums);
}

template <class T>
struct Tiles {
  using Function = void (*)(const T*, int64_t, const T*, int64_t, int64_t, Ahead, int64_t, float*);
  int rows;
  Function full;  // `rows` rows of the weight
  Function one;   // the rows that are left over, one by one
};

template <class T, Asks kAsks, int... I>
constexpr std::array<Tiles<T>, sizeof...(I)> tiles_by_inputs(std::integer_sequence<int, I...>) {
  return {{{tile_rows(I + 1), tile<T, tile_rows(I + 1), I + 1, kAsks>, tile<T, 1, I + 1, kAsks>}...}};
}

template <class T, Asks kAsks>
constexpr auto kTiles = tiles_by_inputs<T, kAsks>(std::make_integer_sequence<int, kTileInputs>());

// Of one row of x, eight rows of the weight: so many beside each other keep enough lines on their way.
template <class T, Asks kAsks>
constexpr Tiles<T> kEightRows{8, tile<T, 8, 1, kAsks>, tile<T, 1, 1, kAsks>};

// Tiles of one row of x: reading the weight takes all the time. On Zen 5 eight rows reach the speed of a plain sum, and
// hints take a tenth of it away. On Zen 4 eight with hints are 1.03 to 1.12 times as fast as four, and as eight
// without. Others were measured with four.
template <class T>
const Tiles<T>& tiles_of_one_row() {
  switch (design()) {
    case Design::kZen5:
      return kEightRows<T, Asks::kNever>;
    case Design::kZen4:
      return kEightRows<T, Asks::kEach>;
    default:
      return kTiles<T, Asks::kEach>[0];
  }
}

// Whether one row of x meets rows of so many bytes one after the other, as they lie in memory. On Zen 4 that is 1.1 to 1.2
// times as fast where they are 2 KiB or less, and slower where they are longer than a page.
inline bool reads_in_order(int64_t bytes) {
  constexpr int64_t kMostBytes = 4 << 10;
  return design() == Design::kZen4 && bytes <= kMostBytes;
}

// Rows of T: `data` is the first, the next begins `stride` elements on.
template <class T>
struct Rows {
  T* data;
  int64_t stride;
  int64_t count;
};

template <class T>
int64_t block_rows(int64_t columns) {
  int64_t rows = kBlockRows;
  while (rows > 4 && rows * columns * int64_t(sizeof(T)) > kBlockBytes) rows /= 2;
  return rows;
}

// Columns of a chunk.
template <class T>
constexpr int64_t kColumns = kChunkBytes / kTileInputs / sizeof(T);

// sums[r] += dot(weight row r, x), each row from its beginning to its end.
template <class T>
void sums_in_order(Rows<const T> weight, const T* x, int64_t columns, float* sums) {
  for (int64_t r = 0; r < weight.count; ++r) {
    for (int64_t column = 0; column < columns; column += kColumns<T>) {
      tile<T, 1, 1, Asks::kNever>(weight.data + r * weight.stride + column, weight.stride, x + column, 0,
                                  std::min(kColumns<T>, columns - column), {}, 0, sums + r);
    }
  }
}

// sums[c * kBlockRows + r] = dot(weight row r, x row c) for all rows c of x and weight.count <= kBlockRows rows r.
// next: where the block begins that comes next, to be fetched meanwhile unless rows have gaps; null is nowhere.
// Every sum is taken in one order: a row of x gives the same bits whatever rows stand beside it.
template <class T>
void block_sums(Rows<const T> weight, Rows<const T> x, int64_t columns, const T* next, float* sums) {
  constexpr int64_t kStep = Operands<T>::kStep;
  constexpr int64_t kChunk = kColumns<T>;
  static_assert(kChunk % kStep == 0);

  std::fill_n(sums, x.count * kBlockRows, 0.0f);
  if (x.count == 1 && reads_in_order(columns * int64_t(sizeof(T)))) {
    return sums_in_order(weight, x.data, columns, sums);
  }

  const int64_t most = tile_inputs(x.count), passes = (x.count + most - 1) / most;
  const auto& all = passes > 1 ? kTiles<T, Asks::kAsTold> : kTiles<T, Asks::kEach>;
  Ahead ahead{reinterpret_cast<const char*>(weight.data), 0};
  if (next && weight.stride == columns) ahead = {reinterpret_cast<const char*>(next), kStep * sizeof(T)};

  for (int64_t column = 0; column < columns; column += kChunk) {
    const int64_t width = std::min(kChunk, columns - column);
    for (int64_t begin = 0; begin < weight.count; begin += kStripRows) {
      const int64_t end = std::min(begin + kStripRows, weight.count);
      for (int64_t pass = 0, c = 0, next_c; pass < passes; ++pass, c = next_c) {
        next_c = (pass + 1) * x.count / passes;  // passes take about equally many
        const auto& tiles = x.count == 1 ? tiles_of_one_row<T>() : all[next_c - c - 1];
        for (int64_t r = begin, done; r < end; r += done) {
          const bool full = r + tiles.rows <= end;
          done = full ? tiles.rows : 1;
          const int64_t told = touches(done, pass, passes);
          (full ? tiles.full : tiles.one)(weight.data + r * weight.stride + column, weight.stride,
                                          x.data + c * x.stride + column, x.stride, width, ahead, told,
                                          sums + c * kBlockRows + r);
          ahead.line += told * (width / kStep) * ahead.step;
        }
      }
    }
  }
}

// A weight as it lies, for code that takes it block by block and packed ones alike.
template <class T>
class PlainWeight {
 public:
  using Type = T;

  PlainWeight(Rows<const T> rows, int64_t columns) : all_(rows), columns_(columns) {}

  int64_t rows() const { return all_.count; }
  int64_t bytes(int64_t rows) const { return rows * columns_ * int64_t(sizeof(T)); }

  // Where a row begins.
  const T* at(int64_t row) const { return all_.data + row * all_.stride; }

  // block_sums of the rows `first` on; next: where the block begins that comes next, or null.
  void block_sums(int64_t first, int64_t count, Rows<const T> x, const void* next, float* sums) const {
    dlinfer::block_sums(Rows<const T>{at(first), all_.stride, count}, x, columns_, static_cast<const T*>(next), sums);
  }

 private:
  const Rows<const T> all_;
  const int64_t columns_;
};

// out[c, r] = bias[r] + dot(weight row first + r, x row c), rounded once, for all rows c of x and count <= kBlockRows
// rows r. bias may be null, and begins with the first row's. another_follows: the rows behind come next.
template <int kMaxInputs, class Weight, class T = typename Weight::Type>
void block(const Weight& weight, int64_t first, int64_t count, Rows<const T> x, const T* bias, Rows<T> out,
           bool another_follows) {
  float sums[kMaxInputs * kBlockRows];
  weight.block_sums(first, count, x, another_follows ? weight.at(first + count) : nullptr, sums);

  for (int64_t c = 0; c < x.count; ++c) {
    for (int64_t r = 0; r < count; ++r) {
      out.data[c * out.stride + r] = T(sums[c * kBlockRows + r] + (bias ? float(bias[r]) : 0.0f));
    }
  }
}

}  // namespace dlinfer
