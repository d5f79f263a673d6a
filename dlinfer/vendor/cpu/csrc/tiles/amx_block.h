// A block's sums by the tile registers of AMX.
#pragma once

#include "tiles/block.h"

#if defined(DLINFER_HAS_TILES)

#include <algorithm>
#include <cstdint>

namespace dlinfer::tiles {

// A block: sums[r * kPanel + c] (+)= dot(weight row r, x row c) over its columns, c < 16 * kTiles.
// Meanwhile the block before it is finished, and two things are prefetched: the rows of `ahead`, as long as these, and
// the memory of `out`, where this block will be written. Written to without that, a line that is in no cache would hold
// up the stores behind it.
template <Type kType, int kTiles, class Finish>
void block_sums(const Factors& of, bool add, Rows<const Byte> ahead, Rows<Byte> out, Finish& finish, float* sums) {
  constexpr int64_t kSumsStride = kPanel * sizeof(float), kOutAtOnce = 4;
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
  const Byte* lower = of.weight + kTile * of.weight_stride;
  for (int64_t step = 0; step < of.steps; ++step) {
    // This part of the weight stays in the first-level cache; x, loaded with a hint, does not drive it out. Tiles are
    // zeroed as common/tile_registers.h explains.
    _tile_stream_loadd(6, of.x + step * kTileBytes, kWidth);
    _tile_loadd(4, of.weight + step * kWidth, of.weight_stride);
    _tile_loadd(5, lower + step * kWidth, of.weight_stride);
    if constexpr (kType == Type::kBFloat16) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    } else {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(2, 5, 6);
    }
    _tile_zero(6);
    if constexpr (kTiles == 2) {
      _tile_stream_loadd(7, of.x + of.x_next + step * kTileBytes, kWidth);
      if constexpr (kType == Type::kBFloat16) {
        _tile_dpbf16ps(1, 4, 7);
        _tile_zero(4);
        _tile_dpbf16ps(3, 5, 7);
      } else {
        _tile_dpbssd(1, 4, 7);
        _tile_zero(4);
        _tile_dpbssd(3, 5, 7);
      }
      _tile_zero(7);
    } else {
      _tile_zero(4);
    }
    _tile_zero(5);
    for (int64_t r = 0; r < ahead.count; ++r) {
      __builtin_prefetch(ahead.data + r * ahead.stride + step * kWidth, 0, 2);
    }
    for (int64_t c = step * kOutAtOnce; c < std::min(out.count, (step + 1) * kOutAtOnce); ++c) {
      __builtin_prefetch(out.data + c * out.stride, 1, 3);
    }
    if (finish.pending()) finish.advance();
  }
  while (finish.pending()) finish.advance();  // before its sums are overwritten
  _tile_stored(0, sums, kSumsStride);
  _tile_stored(2, below, kSumsStride);
  if constexpr (kTiles == 2) {
    _tile_stored(1, right, kSumsStride);
    _tile_stored(3, corner, kSumsStride);
  }
}

}  // namespace dlinfer::tiles

#endif
