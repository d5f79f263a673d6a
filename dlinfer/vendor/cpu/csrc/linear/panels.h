// The work of a product by few_rows.h, cut for threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/few_rows.h"
#include "threads/team.h"

namespace dlinfer {

// Rows of x that meet a block of the weight at once: their part beside a chunk is half of a second-level cache. Where
// there are more threads than blocks, fewer, so that each thread has some.
constexpr int64_t kPanelInputs = 256, kFewestInPanel = 32;

// Below this many bytes of weight a thread is done before another one has begun.
constexpr int64_t kBytesPerThread = 64 << 10;

// body(first row of x, rows of x, first block, behind the last block) for panels of x and ranges of `total` blocks, each
// pair once. Which thread gets which is left to chance.
template <class Body>
void for_panels(int64_t inputs, int64_t total, int64_t block_bytes, const Body& body) {
  if (total == 0 || inputs == 0) return;
  const auto pieces = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  const int64_t panels = std::max(pieces(inputs, kPanelInputs),
                                  std::min(pieces(2 * thread_count(), total), pieces(inputs, kFewestInPanel)));
  const int64_t grain = std::max<int64_t>(kBytesPerThread / std::max<int64_t>(block_bytes, 1), 1);
  parallel_for(0, panels * total, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin / total; panel * total < end; ++panel) {
      const int64_t c = panel * inputs / panels, next_c = (panel + 1) * inputs / panels, before = panel * total;
      body(c, next_c - c, std::max<int64_t>(begin - before, 0), std::min(end - before, total));
    }
  });
}

}  // namespace dlinfer
