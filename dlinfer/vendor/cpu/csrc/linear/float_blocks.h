// x @ weight.T for many rows of x by multiplications in float32, of blocks that were widened and packed into caches.
//
// For float32, and for what is widened to it on processors that have no faster instructions (limits.h). Sums lie along
// rows of the weight, which is packed column by column, so that its rows fill registers; numbers of x are repeated in all
// lanes as they are read. The work is cut six times:
// - chunk: rows of x that are packed together
// - group: rows of the weight, which one thread takes with some rows of the chunk
// - depth: columns of a group, whose packed weight and rows of x stay in the second-level cache
// - block: rows of x that meet a depth one after the other
// - panel: rows of the weight that meet all of a block
// - tile: a panel times a few rows of x, summed in registers
//
// Roofline: a tile of 6 x 2 registers (AVX-512: 12 x 2) takes 12 (24) multiplications for 8 (14) reads. A core does two
// of each in a cycle. Of the multiplications that they can do with 512 rows, two threads of Zen 3 reach 0.65 to
// 0.8, one 0.8 to 0.85; two of Zen 4 with AVX-512 0.85 to 0.9.
#pragma once

#if defined(__AVX2__) && defined(__FMA__)
#define DLINFER_HAS_FLOAT_BLOCKS 1

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/narrow.h"
#include "common/result_memory.h"
#include "common/transpose.h"
#include "common/widen.h"
#include "linear/few_rows.h"
#include "threads/team.h"

namespace dlinfer::float_blocks {

// kTileInputs: rows of x of a tile; kTileRegisters: registers of rows of the weight; kBlockTiles: 192 KiB of x.
#if defined(__AVX512F__)
constexpr int kTileInputs = 12, kTileRegisters = 2;
constexpr int64_t kBlockTiles = 8;
#else
constexpr int kTileInputs = 6, kTileRegisters = 2;
constexpr int64_t kBlockTiles = 16;
#endif
constexpr int64_t kPanelRows = kTileRegisters * kLanes;
constexpr int64_t kTileSums = kTileInputs * kPanelRows;
constexpr int64_t kMostColumns = 512;                           // of a depth
constexpr int64_t kMostGroupRows = 128, kFewestGroupRows = 64;  // of the weight, the former 256 KiB
constexpr int64_t kMostInputs = 512;                            // rows of a chunk
constexpr int64_t kTurns = 2;                                   // a thread, of groups or parts of x that meet one

static_assert(kMostGroupRows % kPanelRows == 0 && kTileInputs % 3 == 0);

inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

// How columns are cut. That depends on nothing but their number, and so does the order of each sum.
struct Depths {
  explicit Depths(int64_t columns)
      : columns(columns),
        count(std::max<int64_t>(pieces(columns, kMostColumns), 1)),
        longest(pieces(pieces(columns, count), kLanes) * kLanes) {}
  int64_t columns, count, longest;
  int64_t begin(int64_t depth) const { return depth * longest; }
  int64_t width(int64_t depth) const { return std::clamp<int64_t>(columns - begin(depth), 0, longest); }
};

// Rows of x in float32: for each depth tiles of kTileInputs rows, each row kMostColumns long. Rows that do not exist
// are zeros.
template <class T>
class PackedInputs {
 public:
  PackedInputs(Rows<const T> x, const Depths& depths)
      : tiles(pieces(x.count, kTileInputs)), memory_(depths.count * tiles * kTile * int64_t(sizeof(float))) {
    parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) pack(x, depths, tile);
    });
  }

  const float* at(int64_t depth, int64_t tile) const { return place(depth, tile); }

  const int64_t tiles;

 private:
  static constexpr int64_t kTile = kTileInputs * kMostColumns;
  static constexpr int64_t kGrain = 4;

  float* place(int64_t depth, int64_t tile) const {
    return memory_.template as<float>() + (depth * tiles + tile) * kTile;
  }

  void pack(Rows<const T> x, const Depths& depths, int64_t tile) {
    for (int64_t depth = 0; depth < depths.count; ++depth) {
      const int64_t width = depths.width(depth);
      float* to = place(depth, tile);
      for (int64_t c = tile * kTileInputs; c < (tile + 1) * kTileInputs; ++c, to += kMostColumns) {
        if (c >= x.count) {
          std::fill_n(to, width, 0.0f);
          continue;
        }
        const T* const from = x.data + c * x.stride + depths.begin(depth);
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) narrow(to + i, widen(from + i));
        if (i < width) narrow(to + i, widen_part(from + i, width - i));  // a row has room for a whole register
      }
    }
  }

  PooledMemory memory_;
};

// kPanelRows rows of the weight, column by column; rows.count of them exist, and zeros stand for the others.
template <class T>
void pack_panel(Rows<const T> rows, int64_t width, float* to) {
  for (int64_t part = 0; part < kTileRegisters; ++part) {
    const int64_t present = std::clamp<int64_t>(rows.count - part * kLanes, 0, kLanes);
    const T* const from = rows.data + part * kLanes * rows.stride;
    for (int64_t column = 0; column < width; column += kLanes) {
      const int64_t count = std::min<int64_t>(width - column, kLanes);
      Floats square[kLanes];
      if (count == kLanes && present == kLanes) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) square[r] = widen(from + r * rows.stride + column);
      } else {
        for (int64_t r = 0; r < kLanes; ++r) {
          square[r] = r < present ? widen_part(from + r * rows.stride + column, count) : Floats{};
        }
      }
      transpose(square);
      for (int64_t i = 0; i < count; ++i) narrow(to + (column + i) * kPanelRows + part * kLanes, square[i]);
    }
  }
}

// sums[c * kPanelRows + r] (+)= dot(row r of the panel, row c of x) over `columns`, each sum's products one by one, for
// kInputs rows c.
template <bool kAdds, int kInputs>
void multiply_tile(const float* x, const float* panel, int64_t columns, float* sums) {
  Floats kept[kInputs * kTileRegisters];
#pragma GCC unroll 32
  for (int i = 0; i < kInputs * kTileRegisters; ++i) kept[i] = kAdds ? widen(sums + i * kLanes) : Floats{};
  for (int64_t column = 0; column < columns; ++column, ++x, panel += kPanelRows) {
    Floats weight[kTileRegisters];
#pragma GCC unroll 4
    for (int j = 0; j < kTileRegisters; ++j) weight[j] = widen(panel + j * kLanes);
#pragma GCC unroll 16
    for (int c = 0; c < kInputs; ++c) {
      const Floats input = all_lanes(x[c * kMostColumns]);
#pragma GCC unroll 4
      for (int j = 0; j < kTileRegisters; ++j) {
        kept[c * kTileRegisters + j] = multiply_add(kept[c * kTileRegisters + j], weight[j], input);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kInputs * kTileRegisters; ++i) narrow(sums + i * kLanes, kept[i]);
}

// The same for at least the first `inputs` rows of a tile of x, in thirds of it.
template <bool kAdds>
void multiply_tile(int64_t inputs, const float* x, const float* panel, int64_t columns, float* sums) {
  constexpr int kThird = kTileInputs / 3;
  const auto multiply = inputs > 2 * kThird ? multiply_tile<kAdds, kTileInputs>
                        : inputs > kThird   ? multiply_tile<kAdds, 2 * kThird>
                                            : multiply_tile<kAdds, kThird>;
  multiply(x, panel, columns, sums);
}

// Of `kPanelRows` sums of a row of x those that exist, with bias (or null), rounded.
template <class T>
void round_row(const float* sums, const T* bias, int64_t count, T* out) {
  for (int64_t r = 0; r < count; r += kLanes) {
    const int64_t lanes = std::min<int64_t>(count - r, kLanes);
    Floats value = widen(sums + r);
    if (bias) value = value + (lanes == kLanes ? widen(bias + r) : widen_part(bias + r, lanes));
    lanes == kLanes ? narrow(out + r, value) : narrow_part(out + r, value, lanes);
  }
}

// A part of a weight that is wanted next: memory fetches it, line by line, while something else is computed.
template <class T>
class Ahead {
 public:
  // In `steps` calls of fetch.
  Ahead(Rows<const T> rows, int64_t width, int64_t steps)
      : rows_(rows), width_(width), lines_(pieces(rows.count * pieces(width, kLine), std::max<int64_t>(steps, 1))) {}

  void fetch() {
    for (int64_t i = 0; i < lines_ && row_ < rows_.count; ++i) {
      __builtin_prefetch(rows_.data + row_ * rows_.stride + column_, 0, 2);
      column_ += kLine;
      if (column_ >= width_) column_ = 0, ++row_;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);

  const Rows<const T> rows_;
  const int64_t width_, lines_;
  int64_t row_ = 0, column_ = 0;
};

// A thread's copy of a group: its weight of one depth, and the sums of the rows of x that it takes, tile by tile.
struct Memory {
  explicit Memory(int64_t tiles)
      : panels(kMostGroupRows * kMostColumns * int64_t(sizeof(float))),
        sums(tiles * (kMostGroupRows / kPanelRows) * kTileSums * int64_t(sizeof(float))) {}
  PooledMemory panels, sums;
};

// `out[c, r] = bias[r] + dot(weight row r, x row c)`, rounded once, for the tiles `begin` to `end` of x, whose first
// row is out's, and weight.count <= kMostGroupRows rows r. bias may be null. rows_behind: of the weight, which come
// next.
template <class T>
void multiply_group(Rows<const T> weight, int64_t rows_behind, const PackedInputs<T>& x, int64_t begin, int64_t end,
                    const Depths& depths, const T* bias, Rows<T> out, const Memory& memory) {
  const int64_t panels = pieces(weight.count, kPanelRows);
  float* const packed = memory.panels.as<float>();
  const auto sums = [&](int64_t tile, int64_t panel) {
    return memory.sums.as<float>() + ((tile - begin) * panels + panel) * kTileSums;
  };
  for (int64_t depth = 0; depth < depths.count; ++depth) {
    const int64_t width = depths.width(depth), panel_size = width * kPanelRows;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t r = panel * kPanelRows;
      const T* const from = weight.data + r * weight.stride + depths.begin(depth);
      pack_panel(Rows<const T>{from, weight.stride, weight.count - r}, width, packed + panel * panel_size);
    }
    Rows<const T> next{weight.data + depths.begin(depth + 1), weight.stride, weight.count};
    if (depth + 1 == depths.count) next = {weight.data + weight.count * weight.stride, weight.stride, rows_behind};
    Ahead<T> ahead(next, depths.width((depth + 1) % depths.count), (end - begin) * panels);
    for (int64_t block = begin; block < end; block += kBlockTiles) {
      for (int64_t panel = 0; panel < panels; ++panel) {
        for (int64_t tile = block; tile < std::min(block + kBlockTiles, end); ++tile) {
          ahead.fetch();
          const int64_t inputs = out.count - (tile - begin) * kTileInputs;
          (depth ? multiply_tile<true> : multiply_tile<false>)(inputs, x.at(depth, tile), packed + panel * panel_size,
                                                                width, sums(tile, panel));
        }
      }
    }
  }
  for (int64_t c = 0; c < out.count; ++c) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t r = panel * kPanelRows;
      round_row(sums(begin + c / kTileInputs, panel) + c % kTileInputs * kPanelRows, bias ? bias + r : nullptr,
                std::min(kPanelRows, weight.count - r), out.data + c * out.stride + r);
    }
  }
}

// Into groups of how many rows weights are cut: so that the thread with the most to do has as little as can be, and
// else the more the better.
template <class Job>
int64_t group_rows(const std::vector<Job>& jobs, int64_t threads) {
  int64_t best = kMostGroupRows, least = std::numeric_limits<int64_t>::max();
  for (int64_t rows = kMostGroupRows; rows >= kFewestGroupRows; rows -= kPanelRows) {
    int64_t groups = 0;
    for (const auto& job : jobs) groups += pieces(job.weight.count, rows);
    const int64_t most = pieces(groups, threads) * rows;
    if (most < least) best = rows, least = most;
  }
  return best;
}

// Of several weights each with a bias (or null) and a result; they have x in common.
template <class T, class Job>
void multiply(Rows<const T> x, int64_t columns, const std::vector<Job>& jobs) {
  const Depths depths(columns);
  const int64_t threads = thread_count(), group = group_rows(jobs, threads);
  const auto groups = [group](const Job& job) { return pieces(job.weight.count, group); };
  int64_t total = 0;
  for (const auto& job : jobs) total += groups(job);
  if (total == 0) return;

  const int64_t chunks = pieces(x.count, kMostInputs);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = chunk * x.count / chunks, count = (chunk + 1) * x.count / chunks - first;
    const PackedInputs<T> packed({x.data + first * x.stride, x.stride, count}, depths);
    // Where there are few groups for the threads, x is cut as well.
    const int64_t cuts = std::clamp<int64_t>(kTurns * threads / total, 1, pieces(packed.tiles, kBlockTiles));
    parallel_for(0, cuts * total, 1, [&](int64_t begin, int64_t end) {
      const Memory memory(pieces(packed.tiles, cuts));
      for (int64_t i = begin; i < end; ++i) {
        const int64_t cut = i / total;
        int64_t index = i % total;
        auto job = jobs.begin();
        for (; index >= groups(*job); ++job) index -= groups(*job);
        const int64_t tile = cut * packed.tiles / cuts, behind = (cut + 1) * packed.tiles / cuts;
        const int64_t r = index * group, c = tile * kTileInputs;
        const int64_t rows = std::min(group, job->weight.count - r);
        multiply_group<T>({job->weight.data + r * job->weight.stride, job->weight.stride, rows},
                          std::min(group, job->weight.count - r - rows), packed, tile, behind, depths,
                          job->bias ? job->bias + r : nullptr,
                          {job->out.data + (first + c) * job->out.stride + r, job->out.stride,
                           std::min(behind * kTileInputs, count) - c},
                          memory);
      }
    });
  }
}

}  // namespace dlinfer::float_blocks

#endif
