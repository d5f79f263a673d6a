// The library's kernels by name, for chains of steps, which call them without torch's dispatcher.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <unordered_map>

namespace dlinfer::chain {

// A kernel as TORCH_BOX makes it: it takes its arguments off the stack and leaves its results there.
using Boxed = void (*)(StableIValue* stack, uint64_t arguments, uint64_t results);

// Filled while the library is loaded, and only read from then on.
inline std::unordered_map<std::string, Boxed>& table() {
  static std::unordered_map<std::string, Boxed> kernels;
  return kernels;
}

// Makes a kernel the op's of that name, and a chain's too.
template <class Library>
void put(Library& library, const char* name, Boxed kernel) {
  library.impl(name, kernel);
  table().emplace(name, kernel);
}

}  // namespace dlinfer::chain
