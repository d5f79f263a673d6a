// x @ weight.T for many rows of x in bfloat16, with the matrix instructions of AMX, and no weight is packed.
//
// The instruction multiplies a tile of 16 x 32 elements, as they lie in a row-major matrix, by a tile whose
// neighbouring rows are interleaved. With the weight on the left nothing has to be done to it: computed is
// out^T = weight @ x^T. Interleaved is x, which is smaller and serves several weights; out^T is transposed in registers
// while it is rounded. The work is cut five times:
// - chunk: rows of x that are packed together: that takes at most 8 MiB, or 128 rows
// - depth: columns, so many that the packed x stays in the second-level cache
// - panel: 32 rows of the weight, which meet all of the chunk; meanwhile the next panel is prefetched
// - part: columns of a panel, so many that they stay in the first-level cache
// - block: a part times 32 rows of x, summed in tile registers
#pragma once

#include "common/tile_registers.h"

#if defined(DLINFER_HAS_TILES)

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/lanes.h"
#include "common/transpose.h"
#include "linear/few_rows.h"

namespace dlinfer {

constexpr int kTileWidth = 2 * kTile;                      // columns of a tile
constexpr int kTileSize = kTile * kTileWidth;              // elements
constexpr int kPanel = 2 * kTile;                          // rows of the weight, or of x, in a block
constexpr int kBlockSums = kPanel * kPanel;
constexpr int64_t kPartSteps = 16;                         // tiles along a part: 32 KiB of a panel
constexpr int64_t kRoundAt[] = {3, 8};                     // steps, of at most that many
constexpr int64_t kDepthTiles = 512 * 32;                  // rows of x times tiles along a depth: 1 MiB
constexpr int64_t kGroup = 8;                              // panels whose sums are kept from depth to depth
constexpr int64_t kMaxPacked = 8 << 20;                    // bytes of a chunk of x, but for the fewest rows
constexpr int64_t kFewestInputs = 128, kMostInputs = 512;  // rows of a chunk
constexpr int64_t kFarOut = 4 << 20;                       // bytes of a result that no second-level cache keeps

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

// The cutting of columns: `count` depths of `longest` tiles, and the last one may be shorter; the fewer rows x has, the
// longer. That changes no bit of a sum, which goes on where the depth before left it.
struct Depths {
  Depths(int64_t columns, int64_t rows)
      : columns(columns),
        tiles(std::max<int64_t>((columns + kTileWidth - 1) / kTileWidth, 1)),
        count((tiles * std::max<int64_t>(rows, kTile) + kDepthTiles - 1) / kDepthTiles),
        longest((tiles + count - 1) / count) {}
  int64_t columns, tiles, count, longest;
  int64_t steps(int64_t depth) const { return std::min(longest, tiles - depth * longest); }
  int64_t width(int64_t depth) const {
    return std::min(steps(depth) * kTileWidth, columns - depth * longest * kTileWidth);
  }
};

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Where the tiles of 16 rows of x from `row` on begin in the packed x of `rows` rows: those of a depth stand together.
inline int64_t packed_at(const Depths& depths, int64_t rows, int64_t depth, int64_t row) {
  return (depth * depths.longest * round_up(rows, kTile) + row * depths.steps(depth)) * kTileWidth;
}

// Packs 16 rows of x (x.count of them exist): lane j of word i of a tile holds columns 2i and 2i + 1 of row j.
inline void pack(Rows<const BFloat16> x, const Depths& depths, int64_t row, BFloat16* packed) {
  const int64_t present = std::min<int64_t>(x.count - row, kTile);
  const BFloat16* from = x.data + row * x.stride;
  for (int64_t depth = 0; depth < depths.count; ++depth) {
    BFloat16* to = packed + packed_at(depths, x.count, depth, row);
    for (int64_t step = 0; step < depths.steps(depth); ++step, to += kTileSize) {
      const int64_t column = (depth * depths.longest + step) * kTileWidth;
      const int64_t width = std::min<int64_t>(depths.columns - column, kTileWidth);
      const __mmask32 exist = width > 0 ? ~__mmask32(0) >> (kTileWidth - width) : 0;
      Floats words[kTile];
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) {
        words[i] = (Floats)_mm512_maskz_loadu_epi16(i < present ? exist : 0, from + i * x.stride + column);
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_store_ps(to + i * kTileWidth, (__m512)words[i]);
    }
  }
}

// out[c, r] = sums[r, c] + bias[r], rounded, for `rows` rows r <= 32 and out.count rows c <= 16 of x.
inline void round_block(const float* sums, const float* bias, int64_t rows, Rows<BFloat16> out) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  Floats words[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    const Floats even = load_as<Floats>(sums + 2 * i * kPanel) + bias[2 * i];
    const Floats odd = load_as<Floats>(sums + (2 * i + 1) * kPanel) + bias[2 * i + 1];
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    words[i] = (Floats)_mm512_permutexvar_epi16(interleave, (__m512i)both);
  }
  transpose(words);
  if (rows == kPanel && out.count == kTile) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; ++i) _mm512_storeu_ps(out.data + i * out.stride, (__m512)words[i]);
    return;
  }
  const __mmask32 exist = ~__mmask32(0) >> (kPanel - rows);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    if (i < out.count) _mm512_mask_storeu_epi16(out.data + i * out.stride, exist, (__m512i)words[i]);
  }
}

// A block whose sums are ready. Half of it, 16 rows of x, is rounded at a time: between two steps of the next block,
// where the tiles leave most of the processor idle.
struct Ready {
  const float* sums = nullptr;
  const float* bias = nullptr;
  int64_t rows = 0;
  Rows<BFloat16> out{};

  void round_half() {
    const int64_t count = std::min<int64_t>(out.count, kTile);
    round_block(sums, bias, rows, {out.data, out.stride, count});
    sums += kTile;
    out.data += kTile * out.stride;
    out.count -= count;
  }
  void finish() {
    while (out.count > 0) round_half();
  }
};

// The operands of a block: `steps` tiles of each row.
struct Factors {
  const BFloat16* weight;
  int64_t weight_stride;
  const BFloat16* x;
  int64_t x_next;  // elements from 16 packed rows of x to the next 16
  int64_t steps;
};

// A block: sums[r * kPanel + c] (+)= dot(weight row r, x row c) over its columns, c < 16 * kTiles.
// Meanwhile the block before it is rounded, and the rows of `ahead`, as long as these, are prefetched.
template <int kTiles>
void block_of_tiles(const Factors& of, bool add, Rows<const BFloat16> ahead, Ready& ready, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float);
  float *right = sums + kTile, *below = sums + kTile * kPanel, *corner = below + kTile;
  if (add) {
    _tile_loadd(0, sums, kSumsStride);
    _tile_loadd(2, below, kSumsStride);
    if constexpr (kTiles == 2) {
      _tile_loadd(1, right, kSumsStride);
      _tile_loadd(3, corner, kSumsStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const int64_t bytes = of.weight_stride * sizeof(BFloat16);
  const BFloat16* lower = of.weight + kTile * of.weight_stride;
  for (int64_t step = 0; step < of.steps; ++step) {
    // This part of the weight stays in the first-level cache; x, loaded with a hint, does not drive it out.
    _tile_stream_loadd(6, of.x + step * kTileSize, 64);
    _tile_loadd(4, of.weight + step * kTileWidth, bytes);
    _tile_loadd(5, lower + step * kTileWidth, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kTiles == 2) {
      _tile_stream_loadd(7, of.x + of.x_next + step * kTileSize, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t r = 0; r < ahead.count; ++r) {
      __builtin_prefetch(ahead.data + r * ahead.stride + step * kTileWidth, 0, 2);
    }
    if ((step == kRoundAt[0] || step == kRoundAt[1]) && ready.out.count > 0) ready.round_half();
  }
  ready.finish();  // before its sums are overwritten
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(2, below, kSumsStride);
  if constexpr (kTiles == 2) {
    _tile_stored(1, right, kSumsStride);
    _tile_stored(3, corner, kSumsStride);
  }
}

// The memory of a thread, each part made when it is needed: 0.25 MiB, 0.5 MiB, and a depth of a panel.
struct Scratch {
  Buffer<BFloat16> out;  // of a group
  Buffer<float> sums;    // likewise
  Buffer<BFloat16> panel;
};

// A copy of a panel's columns, with zeros where `rows` or `width` end, for tiles that would reach beyond the weight.
inline const BFloat16* padded(Rows<const BFloat16> rows, int64_t width, int64_t padded_width, BFloat16* panel) {
  BFloat16* to = panel;
  for (int64_t r = 0; r < kPanel; ++r, to += padded_width) {
    const int64_t exist = r < rows.count ? width : 0;
    std::copy_n(rows.data + r * rows.stride, exist, to);
    std::fill(to + exist, to + padded_width, BFloat16(0.0f));
  }
  memory_is_read();
  return panel;
}

// `out[c, r] = bias[r] + dot(weight row r, x row c)`, rounded once, for the rows c of x from `first` on, out.count of
// them, and at most kGroup panels of the weight; rows_behind more follow these. bias may be null.
// `packed` is x, which has x_rows. The order of each sum depends on nothing but the number of columns.
inline void group(Rows<const BFloat16> weight, int64_t rows_behind, const BFloat16* packed, int64_t x_rows,
                  int64_t first, const Depths& depths, const BFloat16* bias, Rows<BFloat16> out, Scratch& scratch) {
  constexpr int64_t kWidth = kGroup * kPanel;
  const int64_t blocks = (out.count + kPanel - 1) / kPanel;
  alignas(64) float biases[kWidth] = {};
  if (bias) std::copy_n(bias, weight.count, biases);
  alignas(64) float local[kBlockSums];
  Ready ready;
  // In a wide result the 32 elements that a panel gives of a row are too few for the processor to foresee the next
  // write. So the elements of a group are collected, and written row by row.
  const bool collect = out.count * out.stride * int64_t(sizeof(BFloat16)) > kFarOut;
  if (collect && !scratch.out) scratch.out = buffer<BFloat16>(kMostInputs * kWidth);
  const Rows<BFloat16> to = collect ? Rows<BFloat16>{scratch.out.get(), kWidth, out.count} : out;

  for (int64_t depth = 0; depth < depths.count; ++depth) {
    const int64_t steps = depths.steps(depth), width = depths.width(depth);
    const int64_t column = depth * depths.longest * kTileWidth;
    const bool last = depth + 1 == depths.count;
    const int64_t parts = blocks > 1 ? (steps + kPartSteps - 1) / kPartSteps : 1, part = (steps + parts - 1) / parts;
    const bool several = depths.count > 1 || parts > 1;
    if (several && !scratch.sums) scratch.sums = buffer<float>(kMostInputs * kWidth);

    for (int64_t row = 0; row < weight.count; row += kPanel) {
      const Rows<const BFloat16> rows{weight.data + row * weight.stride + column, weight.stride,
                                      std::min<int64_t>(kPanel, weight.count - row)};
      const BFloat16* panel = rows.data;
      int64_t panel_stride = weight.stride;
      if (rows.count < kPanel || width < steps * kTileWidth) {
        if (!scratch.panel) scratch.panel = buffer<BFloat16>(kPanel * depths.longest * kTileWidth);
        panel_stride = steps * kTileWidth;
        panel = padded(rows, width, panel_stride, scratch.panel.get());
      }

      Rows<const BFloat16> next{rows.data, weight.stride, 0};
      if (row + kPanel < weight.count || last) {
        next.data += kPanel * weight.stride;
        next.count = std::clamp<int64_t>(weight.count + (last ? rows_behind : 0) - row - kPanel, 0, kPanel);
      } else {
        next = {weight.data + column + steps * kTileWidth, weight.stride, std::min<int64_t>(kPanel, weight.count)};
      }

      for (int64_t step = 0; step < steps; step += part) {
        const bool complete = last && step + part >= steps;
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t c = i * kPanel, count = std::min<int64_t>(kPanel, out.count - c);
          const Factors factors{panel + step * kTileWidth, panel_stride,
                                packed + packed_at(depths, x_rows, depth, first + c) + step * kTileSize,
                                steps * kTileSize, std::min(part, steps - step)};
          const int64_t begin = next.count * i / blocks, end = next.count * (i + 1) / blocks;
          const Rows<const BFloat16> ahead{next.data + step * kTileWidth + begin * next.stride, next.stride,
                                           end - begin};
          const int64_t kept = (depths.count > 1 ? row / kPanel * blocks : 0) + i;
          float* sums = several ? scratch.sums.get() + kept * kBlockSums : local;
          (count > kTile ? block_of_tiles<2> : block_of_tiles<1>)(factors, depth + step > 0, ahead, ready, sums);
          if (complete) {
            ready = {sums, biases + row, rows.count, {to.data + c * to.stride + row, to.stride, count}};
          }
        }
      }
    }
  }
  ready.finish();

  for (int64_t c = 0; collect && c < out.count; ++c) {
    std::copy_n(to.data + c * to.stride, weight.count, out.data + c * out.stride);
  }
}

}  // namespace dlinfer

#endif
