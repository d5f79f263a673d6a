// The library's kernels by name, for chains of steps, which call them without torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <unordered_map>

namespace dlinfer::chain {

// A kernel from TORCH_BOX: it takes its arguments off the stack and pushes its results.
using Boxed = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

// The number of pieces that threads cut a kernel's weight into. The weight is the second argument, if there is one.
enum class Weight : int64_t { kNone = 0, kWhole = 1, kHalves = 2 };

struct Kernel {
  Boxed call = nullptr;
  Weight weight = Weight::kNone;
};

// Filled while the library is loaded, and only read from then on.
inline std::unordered_map<std::string, Kernel>& table() {
  static std::unordered_map<std::string, Kernel> kernels;
  return kernels;
}

// Registers a kernel for the op of that name, and for chains.
template <class Library>
void put(Library& library, const char* name, Boxed kernel, Weight weight = Weight::kNone) {
  library.impl(name, kernel);
  table().emplace(name, Kernel{kernel, weight});
}

// The same for a linear layer, whose second argument is its weight or a list of weights.
template <class Library>
void put_linear(Library& library, const char* name, Boxed kernel, Weight weight = Weight::kWhole) {
  put(library, name, kernel, weight);
}

}  // namespace dlinfer::chain
