// The library's kernels by name, for chains of steps, which call them without torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <unordered_map>

namespace dlinfer::chain {

// A kernel as TORCH_BOX makes it: it takes its arguments off the stack and leaves its results there.
using Boxed = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

// In how many pieces beside each other a kernel's threads share out the weight that is its second argument, if any is.
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

// Makes a kernel the op's of that name, and a chain's too.
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
