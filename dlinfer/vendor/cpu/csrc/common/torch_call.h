// Errors of torch's C interface. Its own macro for them also prints torch's stack frames to stderr.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <stdexcept>

namespace dlinfer {

// Raises torch's own error of a call that failed.
inline void check(int32_t code) {
#if defined(TORCH_VERSION_2_13_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0  // 2.12 defines no such name
  if (code != TORCH_SUCCESS) throw std::runtime_error(torch_exception_get_what_without_backtrace());
#else
  if (code != TORCH_SUCCESS) throw std::runtime_error("torch 2.12 printed the reason to stderr");
#endif
}

}  // namespace dlinfer
