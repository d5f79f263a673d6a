// From a dtype to the type of its elements.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "common/lanes.h"

namespace dlinfer {

// Calls `function` with a value of the type that a floating dtype's elements have; raises for other dtypes.
template <class Function>
auto with_type(torch::headeronly::ScalarType dtype, const char* op, const Function& function) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Float:
      return function(float());
    case ScalarType::BFloat16:
      return function(BFloat16());
    case ScalarType::Half:
      return function(Half());
    default:
      STD_TORCH_CHECK(false, op, ": no kernel for this dtype");
  }
}

}  // namespace dlinfer
