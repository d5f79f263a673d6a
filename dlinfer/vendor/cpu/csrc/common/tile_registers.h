// The tile registers of AMX: whether there are some, what shapes they have, and whose they are.
//
// A loop of products zeroes each tile of its operands behind the tile's last use. A tile holds a physical register of the
// core until then, and each load needs another one. A zeroed tile holds none. The fewer tiles are held, the more loads
// run ahead. That matters where the core's other hyper-thread is busy, which seems to take part of those registers.
// Nanoseconds a product of two tiles on a Xeon of the Emerald Rapids kind, with 4 tiles of sums and operands in the
// first-level cache:
//
//                                       core alone   shared core
//   four loads, four products              5.7          26.5
//   the same, and four zeroed tiles        5.7          19.5
//   a tile is zeroed, then the last load   5.7          14.4
#pragma once

#include "common/lanes.h"

namespace dlinfer {

constexpr int kTile = 16;  // rows of a tile, and words of 32 bits in each

}  // namespace dlinfer

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define DLINFER_HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace dlinfer {

static_assert(kLanes == kTile);

// Linux grants the tile registers to a process on request; they make its threads' saved state larger.
inline bool tiles_granted() {
#if defined(DLINFER_MODEL)
  return true;  // its tiles are memory
#else
  static const bool granted = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return granted;
#endif
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14]{};
  uint16_t bytes_of_a_row[16]{64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16]{16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShapes kWholeTiles;

// Sets up its thread's tile registers, and releases them in the destructor. The next user sets them up again.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShapes& shapes) {
    asm volatile("" : : "m"(shapes));  // GCC's own load names the first 8 bytes alone: the rest would not be written
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// GCC's tile loads do not tell it that they read memory.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

}  // namespace dlinfer

#endif
