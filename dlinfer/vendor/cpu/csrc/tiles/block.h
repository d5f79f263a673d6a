// A block of a product: 32 rows of the weight times 32 rows of x, and whether this level has instructions for it.
#pragma once

#include <cstdint>

#include "common/lanes.h"
#include "common/tile_registers.h"
#include "linear/few_rows.h"

#if defined(__AVX512BF16__)
#define DLINFER_HAS_PANELS 1

namespace dlinfer::tiles {

using Byte = uint8_t;

constexpr int kWidth = 64;  // bytes of a tile's row
constexpr int kTileBytes = kTile * kWidth;
constexpr int kPanel = 2 * kTile;  // rows of the weight, or of x, in a block

// Whether this process may use the instructions.
inline bool granted() {
#if defined(DLINFER_HAS_TILES)
  return tiles_granted();
#else
  return true;
#endif
}

// The operands of a block: `steps` tiles of each row.
struct Factors {
  const Byte* weight;
  int64_t weight_stride;
  const Byte* x;
  int64_t x_next;  // bytes from 16 packed rows of x to the next 16
  int64_t steps;
};

enum class Type { kBFloat16, kInt8 };

}  // namespace dlinfer::tiles

#endif
