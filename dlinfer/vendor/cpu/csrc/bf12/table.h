// Packed matrices as a whole: made, unpacked, and single rows of them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "bf12/matrix.h"

namespace dlinfer::bf12 {

// All rows, or `count` from `first` on, as a new contiguous bfloat16 tensor [rows, columns].
torch::stable::Tensor unpacked(const Matrix& matrix);
torch::stable::Tensor unpacked(const Matrix& matrix, int64_t first, int64_t count);

}  // namespace dlinfer::bf12
