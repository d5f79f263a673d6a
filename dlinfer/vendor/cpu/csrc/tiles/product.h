// x @ weight.T for many rows of x, with the matrix instructions of AMX in bfloat16 or int8, or with AVX512-BF16. No
// weight is packed.
//
// AMX multiplies a tile of 16 rows of 64 bytes, as they lie in a row-major matrix, by a tile whose neighbouring rows are
// interleaved. With the weight on the left nothing has to be done to it: computed is out^T = weight @ x^T. Interleaved
// is x, which is smaller and serves several weights; out^T is transposed in registers while it is rounded. AVX512-BF16
// multiplies one row of such tiles at a time. Matrices are bytes here, and columns are counted in bytes: only the
// instruction knows their type.
// The work is cut five times:
// - chunk: rows of x that are packed together: that takes at most 8 MiB, or 128 rows
// - depth: columns, so many that the packed x stays in the second-level cache
// - panel: 32 rows of the weight, which meet all of the chunk; meanwhile the next panel is prefetched
// - part: columns of a panel, so many that they stay in the first-level cache
// - block: a part times 32 rows of x, summed in registers (amx_block.h, avx512_block.h)
//
// Sums that are ready are rounded and written by a class of the caller's (linear/tile_results.h).
#pragma once

#include "tiles/block.h"

#if defined(DLINFER_HAS_PANELS)

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/lanes.h"
#include "common/transpose.h"
#include "linear/few_rows.h"
#include "tiles/amx_block.h"
#include "tiles/avx512_block.h"

namespace dlinfer::tiles {

constexpr int kBlockSums = kPanel * kPanel;
constexpr int64_t kPartSteps = 16;                         // tiles along a part: 32 KiB of a panel
constexpr int64_t kDepthTiles = 512 * 32;                  // rows of x times tiles along a depth: 1 MiB
constexpr int64_t kDepthUnit = 4;                          // tiles
constexpr int64_t kGroup = 8;                              // panels whose sums are kept from depth to depth
constexpr int64_t kMaxPacked = 8 << 20;                    // bytes of a chunk of x, but for the fewest rows
constexpr int64_t kFewestInputs = 128, kMostInputs = 512;  // rows of a chunk

struct Free {
  void operator()(void* data) const { ::operator delete(data, std::align_val_t(64)); }
};

// Memory that begins with a cache line.
template <class T>
using Buffer = std::unique_ptr<T[], Free>;

template <class T>
Buffer<T> buffer(int64_t count) {
  return Buffer<T>(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))));
}

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The cutting of columns: `count` depths of `longest` tiles, a multiple of kDepthUnit, and the last one may be shorter;
// the fewer rows x has, the longer. That changes no bit of a sum, which goes on where the depth before left it.
struct Depths {
  Depths(int64_t columns, int64_t rows)
      : columns(columns),
        tiles(std::max<int64_t>((columns + kWidth - 1) / kWidth, 1)),
        longest(kDepthTiles / std::max<int64_t>(rows, kTile)),
        count((tiles + longest - 1) / longest) {
    longest = round_up((tiles + count - 1) / count, kDepthUnit);
    count = (tiles + longest - 1) / longest;
  }
  int64_t columns, tiles, longest, count;
  int64_t steps(int64_t depth) const { return std::min(longest, tiles - depth * longest); }
  int64_t width(int64_t depth) const {
    return std::min(steps(depth) * kWidth, columns - depth * longest * kWidth);
  }
};

// Where the tiles of 16 rows of x from `row` on begin in the packed x of `rows` rows: those of a depth stand together.
inline int64_t packed_at(const Depths& depths, int64_t rows, int64_t depth, int64_t row) {
  return (depth * depths.longest * round_up(rows, kTile) + row * depths.steps(depth)) * kWidth;
}

// Packs 16 rows of x (x.count of them exist): lane j of word i of a tile holds the bytes 4i to 4i + 3 of row j.
inline void pack(Rows<const Byte> x, const Depths& depths, int64_t row, Byte* packed) {
  const int64_t present = std::min<int64_t>(x.count - row, kTile);
  const Byte* from = x.data + row * x.stride;
  for (int64_t depth = 0; depth < depths.count; ++depth) {
    Byte* to = packed + packed_at(depths, x.count, depth, row);
    for (int64_t step = 0; step < depths.steps(depth); ++step, to += kTileBytes) {
      const int64_t column = (depth * depths.longest + step) * kWidth;
      const int64_t width = std::min<int64_t>(depths.columns - column, kWidth);
      const __mmask64 exist = width > 0 ? ~__mmask64(0) >> (kWidth - width) : 0;
      Floats words[kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) {
        words[i] = (Floats)_mm512_maskz_loadu_epi8(i < present ? exist : 0, from + i * x.stride + column);
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_store_ps(to + i * kWidth, (__m512)words[i]);
    }
  }
}

// A function that unpacks rows of a weight: `count` rows from `first` on, and of each `width` bytes from `column` on,
// which is a multiple of kDepthUnit tiles. Rows begin `stride` bytes apart, and may be filled up to there.
using Unpack = void (*)(const void* source, int64_t first, int64_t count, int64_t column, int64_t width, int64_t stride,
                        Byte* to);

// The rows of a weight, panel by panel. If it is gated, panels of its first half, the gates, and of its second half, the
// ups, take turns.
struct Panels {
  Rows<const Byte> weight;
  bool gated = false;
  // If given, `weight` is only what is prefetched: the memory of its rows.
  Unpack unpack = nullptr;
  const void* source = nullptr;

  int64_t features() const { return gated ? weight.count / 2 : weight.count; }  // of a row of the result
  int64_t feature(int64_t panel) const { return (gated ? panel / 2 : panel) * kPanel; }
  int64_t first(int64_t panel) const { return feature(panel) + (gated ? panel % 2 * features() : 0); }
  int64_t rows(int64_t panel) const { return std::min<int64_t>(kPanel, features() - feature(panel)); }
  int64_t at_once() const { return gated ? 2 : 1; }
  // In units of at_once().
  int64_t units() const { return (features() + kPanel - 1) / kPanel; }
  bool completes(int64_t panel) const { return !gated || panel % 2; }  // whether features are ready behind it
};

// A block whose sums are ready: sums[r * kPanel + c] for `rows` rows r <= 32 of a panel and `count` rows c <= 32 of x.
struct Block {
  int64_t panel, first;  // the panel, and the first row of x
  int64_t rows, count;
  const float* sums;   // words: int32 of int8 products
  const float* gates;  // the same of the panel before it if the weight is gated, or null
};

// Rows that are a multiple of this apart share so few places in the first-level cache that a part of a panel does not
// stay there. Copied, they are a little farther apart.
constexpr int64_t kCrowded = 2048, kApart = 256;
constexpr int64_t kSeldom = 8;  // blocks, for which a copy does not pay

// The memory of a thread, which it keeps.
struct Scratch {
  Buffer<float> sums = buffer<float>(kMostInputs * kGroup * kPanel);  // of a group: 0.5 MiB
  Buffer<Byte> panel = buffer<Byte>(kPanel * (kDepthTiles / kTile * kWidth + kApart));  // a depth of it: 2 MiB
};

// A panel's rows, with zeros where they or `width` end, for tiles that would reach beyond the weight.
struct Panel {
  const Byte* data;
  int64_t stride;
};

// The columns of a panel for `steps` tiles. often: whether each is read several times.
inline Panel panel_of(const Panels& panels, int64_t panel, int64_t column, int64_t width, int64_t steps, bool often,
                      Byte* memory) {
  const int64_t first = panels.first(panel), count = panels.rows(panel), whole = round_up(steps, kDepthUnit) * kWidth;
  const int64_t given = panels.weight.stride, stride = whole + (whole % kCrowded == 0 ? kApart : 0);
  const Byte* const from = panels.weight.data + first * given + column;
  if (panels.unpack) {
    panels.unpack(panels.source, first, count, column, width, stride, memory);
  } else if (count == kPanel && width == steps * kWidth && !(often && given % kCrowded == 0)) {
    return {from, given};
  } else {
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(from + r * given, width, memory + r * stride);
      std::fill(memory + r * stride + width, memory + r * stride + whole, Byte(0));
    }
  }
  std::fill(memory + count * stride, memory + kPanel * stride, Byte(0));
#if defined(DLINFER_HAS_TILES)
  memory_is_read();
#endif
  return {memory, stride};
}

// Multiplies the rows of x from `first` on, `count` of them, by the panels `begin` to `end`, at most kGroup. Each block
// goes to `finish` once its sums are ready. The panels up to `behind` come next. `packed` is x, which has x_rows.
// The order of each sum depends on nothing but the number of columns.
template <Type kType, class Finish>
void group(const Panels& panels, int64_t begin, int64_t end, int64_t behind, const Byte* packed, int64_t x_rows,
           int64_t first, int64_t count, const Depths& depths, Finish& finish, Scratch& scratch) {
  const Rows<const Byte>& weight = panels.weight;
  const int64_t blocks = (count + kPanel - 1) / kPanel;
  for (int64_t depth = 0; depth < depths.count; ++depth) {
    const int64_t steps = depths.steps(depth), width = depths.width(depth), column = depth * depths.longest * kWidth;
    const int64_t parts = blocks > 1 ? (steps + kPartSteps - 1) / kPartSteps : 1, part = (steps + parts - 1) / parts;
    const bool last = depth + 1 == depths.count;

    for (int64_t panel = begin; panel < end; ++panel) {
      const auto [from, stride] = panel_of(panels, panel, column, width, steps, blocks > kSeldom, scratch.panel.get());
      Rows<const Byte> next{weight.data, weight.stride, 0};
      if (const int64_t after = panel + 1 == end && !last ? begin : panel + 1; after < behind) {
        const int64_t to = panel + 1 < end ? column : last ? 0 : column + steps * kWidth;
        next.data += panels.first(after) * weight.stride + to;
        next.count = panels.rows(after);
      }

      // Sums are kept from depth to depth, and those of gates until their ups are there.
      const int64_t place = depths.count > 1 ? panel - begin : panel % panels.at_once();
      for (int64_t step = 0; step < steps; step += part) {
        const bool complete = last && step + part >= steps && panels.completes(panel);
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t c = i * kPanel, some = std::min<int64_t>(kPanel, count - c);
          const Factors factors{from + step * kWidth, stride,
                                packed + packed_at(depths, x_rows, depth, first + c) + step * kTileBytes,
                                steps * kTileBytes, std::min(part, steps - step)};
          const int64_t ahead = next.count * i / blocks, ahead_end = next.count * (i + 1) / blocks;
          const Rows<const Byte> fetched{next.data + step * kWidth + ahead * next.stride, next.stride,
                                         ahead_end - ahead};
          float* const sums = scratch.sums.get() + (place * blocks + i) * kBlockSums;
          const float* const gates = complete && panels.gated ? sums - blocks * kBlockSums : nullptr;
          const Block block{panel, first + c, panels.rows(panel), some, sums, gates};
          const Rows<Byte> out = complete ? finish.memory(block) : Rows<Byte>{};
          (some > kTile ? block_sums<kType, 2, Finish> : block_sums<kType, 1, Finish>)(
              factors, depth + step > 0, fetched, out, finish, sums);
          if (complete) finish.begin(block);
        }
      }
    }
  }
  while (finish.pending()) finish.advance();
}

}  // namespace dlinfer::tiles

#endif
