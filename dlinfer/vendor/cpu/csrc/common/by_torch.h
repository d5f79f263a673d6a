// torch's own kernels, for calls that ours do not serve.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

#include "common/torch_call.h"

namespace dlinfer {

// The result of an op without an overload's name, which gives one tensor. args: all of its arguments, in their order.
template <class... Args>
torch::stable::Tensor by_torch(const char* op, const Args&... args) {
  namespace convert = torch::stable::detail;
  std::array<StableIValue, sizeof...(Args)> stack{convert::from(args)...};
  check(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return convert::to<torch::stable::Tensor>(stack[0]);
}

}  // namespace dlinfer
