// A linear layer for other kernels of this library to call.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace dlinfer {

// x @ weight.T + bias in x's dtype, by whatever is the fastest for so many rows of x, torch's product among it; with
// all threads. Raises where shapes or dtypes do not fit.
torch::stable::Tensor linear(torch::stable::Tensor x, torch::stable::Tensor weight,
                             std::optional<torch::stable::Tensor> bias);

}  // namespace dlinfer
