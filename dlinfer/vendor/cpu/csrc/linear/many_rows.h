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
//
// A weight of gates and ups may have silu_and_mul behind the product. A panel of gates and the panel of their ups then
// follow each other, and the activation is computed while the sums are rounded. The product itself, which is twice as
// large as the result, is never in memory.
#pragma once

#include "common/tile_registers.h"

#if defined(DLINFER_HAS_TILES)

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/lanes.h"
#include "common/narrow.h"
#include "common/sigmoid.h"
#include "common/transpose.h"
#include "linear/few_rows.h"

namespace dlinfer {

constexpr int kTileWidth = 2 * kTile;                      // columns of a tile
constexpr int kTileSize = kTile * kTileWidth;              // elements
constexpr int kPanel = 2 * kTile;                          // rows of the weight, or of x, in a block
constexpr int kBlockSums = kPanel * kPanel;
constexpr int64_t kPartSteps = 16;                         // tiles along a part: 32 KiB of a panel
constexpr int64_t kDepthTiles = 512 * 32;                  // rows of x times tiles along a depth: 1 MiB
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

// The rows of a weight, panel by panel. If it is gated, panels of its first half, the gates, and of its second half, the
// ups, take turns.
struct Panels {
  Rows<const BFloat16> weight;
  const BFloat16* bias;  // or null
  bool gated;

  int64_t features() const { return gated ? weight.count / 2 : weight.count; }  // of a row of the result
  int64_t feature(int64_t panel) const { return (gated ? panel / 2 : panel) * kPanel; }
  int64_t first(int64_t panel) const { return feature(panel) + (gated ? panel % 2 * features() : 0); }
  int64_t rows(int64_t panel) const { return std::min<int64_t>(kPanel, features() - feature(panel)); }
  int64_t at_once() const { return gated ? 2 : 1; }
  // In units of at_once().
  int64_t units() const { return (features() + kPanel - 1) / kPanel; }
  bool completes(int64_t panel) const { return !gated || panel % 2; }  // whether features are ready behind it
};

// Sums of a block that are ready, and what is added to each row of them.
struct Sums {
  const float* sums = nullptr;
  const float* bias = nullptr;

  Floats row(int64_t r) const { return load_as<Floats>(sums + r * kPanel) + bias[r]; }
};

// A block to be rounded and written: out[c, r] for `rows` features r <= 32 and out.count rows c <= 32 of x. That is done
// piece by piece between the steps of the next block, where the tiles leave most of the processor idle.
struct Ready {
  Sums own, gates;  // gates.sums is null if the block has no gates
  int64_t rows = 0;
  Rows<BFloat16> out{};
  int words = 0;              // of these are computed; word i of a row holds features 2i and 2i + 1
  Floats computed[kTile]{};

  bool pending() const { return out.count > 0; }

  // A part of the work: an eighth of a block of 32 rows of x.
  void advance() {
    constexpr int kAtOnce = 4;
#pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t r = 2 * (words + i);
      computed[words + i] = gates.sums ? gated(r) : plain(r);
    }
    words += kAtOnce;
    if (words == kTile) write_half();
  }
  void finish() {
    while (pending()) advance();
  }

 private:
  Floats plain(int64_t r) const {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                                23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)own.row(r + 1), (__m512)own.row(r));
    return (Floats)_mm512_permutexvar_epi16(interleave, (__m512i)both);
  }

  // Each number is rounded where the product and the activation apart round it. The bits are theirs, except for sums
  // below 2**-126, which the product apart takes as 0.
  Floats gated(int64_t r) const {
    const auto value = [&](int64_t row) {
      const Floats gate = rounded<BFloat16>(gates.row(row));
      return rounded<BFloat16>(rounded<BFloat16>(gate * sigmoid(gate)) * rounded<BFloat16>(own.row(row)));
    };
    return (Floats)((Words)value(r + 1) | (Words)value(r) >> 16);
  }

  // Writes the first 16 rows of x, and goes on to the others.
  void write_half() {
    Floats turned[kTile];
    std::copy_n(computed, kTile, turned);
    transpose(turned);
    const int64_t count = std::min<int64_t>(out.count, kTile);
    const __mmask32 exist = ~__mmask32(0) >> (kPanel - rows);
    if (rows == kPanel && count == kTile) {
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_storeu_ps(out.data + i * out.stride, (__m512)turned[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) {
        if (i < count) _mm512_mask_storeu_epi16(out.data + i * out.stride, exist, (__m512i)turned[i]);
      }
    }
    words = 0;
    own.sums += kTile;
    if (gates.sums) gates.sums += kTile;
    out.data += kTile * out.stride;
    out.count -= count;
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
// Meanwhile the block before it is rounded, and two things are prefetched: the rows of `ahead`, as long as these, and
// the memory of `out`, where this block will be written. Written to without that, a line that is in no cache would hold
// up the stores behind it.
template <int kTiles>
void block_of_tiles(const Factors& of, bool add, Rows<const BFloat16> ahead, Rows<BFloat16> out, Ready& ready,
                    float* sums) {
  constexpr int64_t kOutAtOnce = 4;
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
    for (int64_t c = step * kOutAtOnce; c < std::min(out.count, (step + 1) * kOutAtOnce); ++c) {
      __builtin_prefetch(out.data + c * out.stride, 1, 3);
    }
    if (ready.pending()) ready.advance();
  }
  ready.finish();  // before its sums are overwritten
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(2, below, kSumsStride);
  if constexpr (kTiles == 2) {
    _tile_stored(1, right, kSumsStride);
    _tile_stored(3, corner, kSumsStride);
  }
}

// The memory of a thread, which it keeps.
struct Scratch {
  Buffer<float> sums = buffer<float>(kMostInputs * kGroup * kPanel);  // of a group: 0.5 MiB
  Buffer<BFloat16> panel = buffer<BFloat16>(kPanel * kDepthTiles / kTile * kTileWidth);  // a depth of it: 1 MiB
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

// `out[c, r] = bias[r] + dot(weight row r, x row c)`, rounded once, or what silu_and_mul makes of it. It takes the rows c
// of x from `first` on, out.count of them, and the panels `begin` to `end`, at most kGroup. The panels up to `behind`
// come next. `packed` is x, which has x_rows. The order of each sum depends on nothing but the number of columns.
inline void group(const Panels& panels, int64_t begin, int64_t end, int64_t behind, const BFloat16* packed,
                  int64_t x_rows, int64_t first, const Depths& depths, Rows<BFloat16> out, Scratch& scratch) {
  const Rows<const BFloat16>& weight = panels.weight;
  const int64_t blocks = (out.count + kPanel - 1) / kPanel;
  alignas(64) float biases[kGroup * kPanel] = {};
  for (int64_t panel = begin; panels.bias && panel < end; ++panel) {
    std::copy_n(panels.bias + panels.first(panel), panels.rows(panel), biases + (panel - begin) * kPanel);
  }
  Ready ready;

  for (int64_t depth = 0; depth < depths.count; ++depth) {
    const int64_t steps = depths.steps(depth), width = depths.width(depth);
    const int64_t column = depth * depths.longest * kTileWidth;
    const int64_t parts = blocks > 1 ? (steps + kPartSteps - 1) / kPartSteps : 1, part = (steps + parts - 1) / parts;

    for (int64_t panel = begin; panel < end; ++panel) {
      const bool last = depth + 1 == depths.count;
      // Sums are kept from depth to depth, and those of gates until their ups are there.
      const int64_t place = depths.count > 1 ? panel - begin : panel % panels.at_once();
      const Rows<const BFloat16> rows{weight.data + panels.first(panel) * weight.stride + column, weight.stride,
                                      panels.rows(panel)};
      const BFloat16* from = rows.data;
      int64_t stride = weight.stride;
      if (rows.count < kPanel || width < steps * kTileWidth) {
        stride = steps * kTileWidth;
        from = padded(rows, width, stride, scratch.panel.get());
      }

      Rows<const BFloat16> next{weight.data, weight.stride, 0};
      if (const int64_t after = panel + 1 == end && !last ? begin : panel + 1; after < behind) {
        const int64_t to = panel + 1 < end ? column : last ? 0 : column + steps * kTileWidth;
        next.data += panels.first(after) * weight.stride + to;
        next.count = panels.rows(after);
      }

      for (int64_t step = 0; step < steps; step += part) {
        const bool complete = last && step + part >= steps && panels.completes(panel);
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t c = i * kPanel, count = std::min<int64_t>(kPanel, out.count - c);
          const Factors factors{from + step * kTileWidth, stride,
                                packed + packed_at(depths, x_rows, depth, first + c) + step * kTileSize,
                                steps * kTileSize, std::min(part, steps - step)};
          const int64_t ahead = next.count * i / blocks, ahead_end = next.count * (i + 1) / blocks;
          const Rows<const BFloat16> fetched{next.data + step * kTileWidth + ahead * next.stride, next.stride,
                                             ahead_end - ahead};
          const Rows<BFloat16> to{out.data + c * out.stride + panels.feature(panel), out.stride, complete ? count : 0};
          float* const sums = scratch.sums.get() + (place * blocks + i) * kBlockSums;
          (count > kTile ? block_of_tiles<2> : block_of_tiles<1>)(factors, depth + step > 0, fetched, to, ready, sums);
          if (complete) {
            const float* const bias = biases + (panel - begin) * kPanel;
            ready.own = {sums, bias};
            if (panels.gated) ready.gates = {sums - blocks * kBlockSums, bias - kPanel};
            ready.rows = rows.count, ready.out = to;
          }
        }
      }
    }
  }
  ready.finish();
}

}  // namespace dlinfer

#endif
