// dlinfer_cpu::make_chain, run_chain and free_chain: steps of a compiled graph in one call, without Python in between.
//
// A decode step of a model has several hundred steps, kernels and views. Most of them take less time than Python needs
// to call them. dlinfer/vendor/cpu/inductor/chains.py writes a chain and explains its numbers. It is decoded once.
// While a chain runs, other Python threads may run: torch releases the GIL around an op.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/torch_call.h"
#include "threads/team.h"

namespace dlinfer::chain {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;
using MaybeTensor = std::optional<Tensor>;

// The kind of an argument in a kernel's signature, numbered as in chains.py.
enum class Kind : int64_t {
  kNone, kTensor, kMaybeTensor, kInt, kSize, kFloat, kMaybeFloat, kBool, kDtype, kTensors, kMaybeTensors, kInts
};

using torch::headeronly::ScalarType;
constexpr ScalarType kDtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Char};

struct Argument {
  Kind kind;
  int64_t value = 0;  // a register, an integer, a float's bits, or an index of kDtypes
  std::vector<Argument> items;
};

enum class Call : int64_t { kKernel, kDispatched, kContiguous };

// A weight among a chain's inputs, and the number of pieces that it is cut into.
struct Read {
  int64_t tensor, pieces;
};

struct Step {
  Call call;
  Kernel kernel;
  std::string name, overload;
  std::vector<Argument> arguments;
  std::vector<int64_t> results;  // registers
  bool gives_list = false;       // the results are one list of tensors
  std::vector<int64_t> last_used;  // registers that nothing reads from here on
  std::optional<Read> next_read;   // if this step reads a weight: the next weight
};

struct Chain {
  int64_t tensors, registers, sizes;  // given; tensors in all; sizes given
  std::vector<Step> steps;
  std::vector<int64_t> results;
  std::optional<Read> first_read;
};

// Reads what chains.py wrote.
class Reader {
 public:
  explicit Reader(const std::vector<int64_t>& code) : code_(code) {}

  Chain chain() {
    Chain chain{next(), next(), next(), {}, {}, {}};
    for (int64_t left = next(); left > 0; --left) chain.steps.push_back(step());
    chain.results = numbers();
    for (auto step = chain.steps.rbegin(); step != chain.steps.rend(); ++step) {
      if (const auto read = weight_of(*step, chain.tensors)) {
        step->next_read = std::exchange(chain.first_read, read);
      }
    }
    STD_TORCH_CHECK(at_ == code_.size(), "make_chain: numbers behind the end of the chain");
    return chain;
  }

 private:
  int64_t next() {
    STD_TORCH_CHECK(at_ < code_.size(), "make_chain: the chain ends early");
    return code_[at_++];
  }

  std::vector<int64_t> numbers() {
    std::vector<int64_t> found(next());
    for (int64_t& one : found) one = next();
    return found;
  }

  std::string text() {
    std::string found(next(), ' ');
    for (char& one : found) one = char(next());
    return found;
  }

  Argument argument() {
    Argument found{Kind(next())};
    if (found.kind < Kind::kTensors) {
      found.value = next();
      STD_TORCH_CHECK(found.kind != Kind::kDtype || uint64_t(found.value) < std::size(kDtypes),
                      "make_chain: there is no dtype ", found.value);
      return found;
    }
    for (int64_t left = next(); left > 0; --left) found.items.push_back(argument());
    return found;
  }

  Step step() {
    Step found{Call(next())};
    found.name = text();
    found.overload = text();
    if (found.call == Call::kKernel) {
      const auto kernel = table().find(found.name);
      STD_TORCH_CHECK(kernel != table().end(), "make_chain: there is no kernel ", found.name);
      found.kernel = kernel->second;
    }
    for (int64_t left = next(); left > 0; --left) found.arguments.push_back(argument());
    found.gives_list = next() != 0;
    found.results = numbers();
    found.last_used = numbers();
    return found;
  }

  static std::optional<Read> weight_of(const Step& step, int64_t tensors) {
    if (step.kernel.weight == Weight::kNone) return std::nullopt;
    const Argument& weight = step.arguments.at(1);
    const Argument& first = weight.kind == Kind::kTensors && !weight.items.empty() ? weight.items[0] : weight;
    if (first.kind != Kind::kTensor || first.value >= tensors) return std::nullopt;
    return Read{first.value, int64_t(step.kernel.weight)};
  }

  const std::vector<int64_t>& code_;
  size_t at_ = 0;
};

// One run of a chain.
class Run {
 public:
  Run(const Chain& chain, std::vector<Tensor> tensors, const std::vector<int64_t>& sizes)
      : chain_(chain), sizes_(sizes), registers_(chain.registers) {
    for (size_t i = 0; i < tensors.size(); ++i) registers_[i] = std::move(tensors[i]);
  }

  std::vector<Tensor> operator()() {
    announce(chain_.first_read);
    for (size_t i = 0; i < chain_.steps.size(); ++i) {
      try {
        call(chain_.steps[i]);
      } catch (const std::exception& error) {
        set_results_escape(false);  // the step that would is left out now
        throw std::runtime_error("step " + std::to_string(i) + ": " + error.what());
      }
    }
    std::vector<Tensor> results;
    results.reserve(chain_.results.size());
    for (int64_t one : chain_.results) results.push_back(*registers_[one]);
    return results;
  }

 private:
  // Lets idle threads prefetch the weight of the next linear layer.
  void announce(const std::optional<Read>& read) const {
    if (!read) return;
    const Tensor& weight = *registers_[read->tensor];
    if (!weight.is_contiguous()) return;
    will_share(weight.const_data_ptr(), weight.numel() * int64_t(weight.element_size()) / read->pieces);
  }

  void call(const Step& step) {
    announce(step.next_read);
    if (step.call == Call::kContiguous) {
      const Tensor& x = *registers_[step.arguments[0].value];
      registers_[step.results[0]] = x.is_contiguous() ? x : torch::stable::contiguous(x);
    } else {
      const size_t results = step.gives_list ? 1 : step.results.size();
      std::vector<StableIValue> stack(std::max(step.arguments.size(), results));
      for (size_t i = 0; i < step.arguments.size(); ++i) stack[i] = boxed(step.arguments[i]);
      if (step.call == Call::kKernel) {
        step.kernel.call(stack.data(), step.arguments.size(), results);
      } else {
        check(torch_call_dispatcher(step.name.c_str(), step.overload.c_str(), stack.data(), TORCH_ABI_VERSION));
      }
      if (step.gives_list) {
        auto list = to<std::vector<Tensor>>(stack[0]);
        STD_TORCH_CHECK(list.size() == step.results.size(), step.name, " gave ", list.size(), " tensors");
        for (size_t i = 0; i < list.size(); ++i) registers_[step.results[i]] = std::move(list[i]);
      } else {
        for (size_t i = 0; i < results; ++i) registers_[step.results[i]] = to<Tensor>(stack[i]);
      }
    }
    for (int64_t one : step.last_used) registers_[one].reset();
  }

  // A kernel takes ownership of its stack, so a tensor is put there as a new reference.
  StableIValue boxed(const Argument& argument) const {
    switch (argument.kind) {
      case Kind::kNone:
        return from(std::nullopt);
      case Kind::kTensor:
        return from(*registers_[argument.value]);
      case Kind::kMaybeTensor:
        return from(registers_[argument.value]);
      case Kind::kInt:
        return from(argument.value);
      case Kind::kSize:
        return from(sizes_[argument.value]);
      case Kind::kFloat:
        return from(std::bit_cast<double>(argument.value));
      case Kind::kMaybeFloat:
        return from(std::optional(std::bit_cast<double>(argument.value)));
      case Kind::kBool:
        return from(argument.value != 0);
      case Kind::kDtype:
        return from(kDtypes[argument.value]);
      case Kind::kTensors:
        return from(listed<Tensor>(argument, [&](const Argument& one) { return *registers_[one.value]; }));
      case Kind::kMaybeTensors:
        return from(listed<MaybeTensor>(argument, [&](const Argument& one) {
          return one.kind == Kind::kNone ? MaybeTensor() : registers_[one.value];
        }));
      case Kind::kInts:
        return from(listed<int64_t>(argument, [&](const Argument& one) {
          return one.kind == Kind::kSize ? sizes_[one.value] : one.value;
        }));
    }
    throw std::logic_error("an argument of no kind");
  }

  template <class T, class F>
  static std::vector<T> listed(const Argument& argument, F&& item) {
    std::vector<T> found;
    found.reserve(argument.items.size());
    for (const Argument& one : argument.items) found.push_back(item(one));
    return found;
  }

  const Chain& chain_;
  const std::vector<int64_t>& sizes_;
  std::vector<MaybeTensor> registers_;
};

// Handle -> chain. A run keeps its chain alive, even if another thread frees it.
class Chains {
 public:
  static Chains& all() {
    static Chains* const chains = new Chains;  // interpreters end later than static objects
    return *chains;
  }

  int64_t add(Chain chain) {
    const std::lock_guard lock(mutex_);
    chains_[++last_] = std::make_shared<const Chain>(std::move(chain));
    return last_;
  }

  std::shared_ptr<const Chain> find(int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = chains_.find(handle);
    STD_TORCH_CHECK(found != chains_.end(), "run_chain: there is no chain ", handle);
    return found->second;
  }

  void remove(int64_t handle) {
    const std::lock_guard lock(mutex_);
    chains_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Chain>> chains_;
  int64_t last_ = 0;
};

int64_t make_chain(const std::vector<int64_t>& code) { return Chains::all().add(Reader(code).chain()); }

void free_chain(int64_t handle) { Chains::all().remove(handle); }

std::vector<Tensor> run_chain(int64_t handle, std::vector<Tensor> tensors, const std::vector<int64_t>& sizes) {
  const auto chain = Chains::all().find(handle);
  STD_TORCH_CHECK(int64_t(tensors.size()) == chain->tensors && int64_t(sizes.size()) == chain->sizes, "run_chain: ",
                  chain->tensors, " tensors and ", chain->sizes, " sizes are needed, got ", tensors.size(), " and ",
                  sizes.size());
  return Run(*chain, std::move(tensors), sizes)();
}

}  // namespace
}  // namespace dlinfer::chain

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("make_chain(int[] code) -> int");
  library.def("free_chain(int chain) -> ()");
  library.def("run_chain(int chain, Tensor[] tensors, int[] sizes) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CompositeExplicitAutograd, library) {
  library.impl("make_chain", TORCH_BOX(&dlinfer::chain::make_chain));
  library.impl("free_chain", TORCH_BOX(&dlinfer::chain::free_chain));
  library.impl("run_chain", TORCH_BOX(&dlinfer::chain::run_chain));
}
