// The work of products by tiles, cut for threads.
#pragma once

#include "tiles/product.h"

#if defined(DLINFER_HAS_PANELS)

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/result_memory.h"
#include "linear/panels.h"
#include "threads/team.h"

namespace dlinfer::tiles {

// Packing x is quick: below this many bytes (20 us) it is not worth waiting for another thread, which may be kept.
constexpr int64_t kPackedPerThread = 512 << 10;

template <class T>
Rows<const Byte> as_bytes(Rows<const T> rows) {
  return {reinterpret_cast<const Byte*>(rows.data), rows.stride * int64_t(sizeof(T)), rows.count};
}

// The products of x with the weights of all jobs. columns: bytes of a row. A job has `panels`, those of its weight, and
// makes the object that finishes some of them: job.finish(begin, end, the row of x that a chunk begins with).
template <Type kType, class Job>
void multiply(Rows<const Byte> x, int64_t columns, const std::vector<Job>& jobs) {
  int64_t total = 0;
  for (const auto& job : jobs) total += job.panels.units();
  if (total == 0 || x.count == 0) return;

  const int64_t row_bytes = round_up(std::max<int64_t>(columns, 1), kWidth);
  const int64_t fit = std::clamp(kMaxPacked / row_bytes / kPanel * kPanel, kFewestInputs, kMostInputs);
  const int64_t chunks = (x.count + fit - 1) / fit;
  const int64_t chunk = round_up((x.count + chunks - 1) / chunks, kPanel);
  const Depths depths(columns, std::min(x.count, chunk));
  const PooledMemory memory(std::min(round_up(x.count, kTile), chunk) * depths.tiles * kWidth);
  Byte* const packed = memory.as<Byte>();

  // Where there are few panels for the threads, x is cut as well.
  const int64_t threads = thread_count();
  const int64_t grain = std::max<int64_t>(kBytesPerThread / (kPanel * row_bytes), 1);
  for (int64_t first = 0; first < x.count; first += chunk) {
    const Rows<const Byte> rows{x.data + first * x.stride, x.stride, std::min(chunk, x.count - first)};
    const int64_t pack_grain = std::max<int64_t>(kPackedPerThread / (kTile * row_bytes), 1);
    parallel_for(0, (rows.count + kTile - 1) / kTile, pack_grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack(rows, depths, i * kTile, packed);
    });
    const int64_t blocks = (rows.count + kPanel - 1) / kPanel;
    const int64_t cuts = threads == 1 ? 1 : std::clamp<int64_t>(4 * threads / total, 1, (blocks + 1) / 2);
    const int64_t piece = (blocks + cuts - 1) / cuts * kPanel;
    parallel_for(0, cuts * total, grain, [&](int64_t begin, int64_t end) {
#if defined(DLINFER_HAS_TILES)
      const TileRegisters registers(kWholeTiles);
#endif
      static thread_local Scratch scratch;
      int64_t before = 0;
      for (int64_t c = 0; c < rows.count; c += piece) {
        const int64_t inputs = std::min(piece, rows.count - c);
        for (const Job& job : jobs) {
          const int64_t at_once = job.panels.at_once(), units = job.panels.units();
          const int64_t last = std::min(end - before, units) * at_once;
          for (int64_t i = std::max<int64_t>(begin - before, 0) * at_once; i < last; i += kGroup) {
            auto finish = job.finish(i, std::min(i + kGroup, last), first);
            group<kType>(job.panels, i, std::min(i + kGroup, last), last, packed, rows.count, c, inputs, depths, finish,
                         scratch);
          }
          before += units;
        }
      }
    });
  }
}

}  // namespace dlinfer::tiles

#endif
