// Whether a row's result has the same bits whatever rows are computed with it (DLINFER_CPU_BATCH_INVARIANT).
//
// Each kernel adds up a row in an order that depends on nothing but the row. Two kernels for one op have two orders, and
// the number of rows decides between them. In this mode one kernel takes every number of rows.
#pragma once

#include <atomic>

namespace dlinfer {

inline std::atomic<bool>& invariance() {
  static std::atomic<bool> on{false};
  return on;
}

inline bool batch_invariant() { return invariance().load(std::memory_order_relaxed); }

inline void set_batch_invariant(bool on) { invariance().store(on); }

}  // namespace dlinfer
