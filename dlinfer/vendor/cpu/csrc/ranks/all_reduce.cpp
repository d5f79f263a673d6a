// dlinfer_cpu::all_reduce: the sum of a tensor over the processes (ranks) of a model, through memory that they share.
//
// Each rank copies its numbers into its slot, meets the others, and adds up all slots in the order of ranks, in float32,
// rounded once. So all ranks get the same bits, at each run. There are two slots for each rank, used in turn: a rank
// writes one again when all have met once more, and so have read it. Of many numbers and many ranks each rank adds up a
// part, and takes the other parts from the others.
//
// Roofline: [1, 4096] bfloat16 between two ranks is 8 KiB each way, below 2 us; what counts is the way of a cache line
// from one core to another, twice.
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "chain/table.h"
#include "common/narrow.h"
#include "common/with_type.h"
#include "ranks/meeting.h"
#include "threads/team.h"

namespace dlinfer::ranks {
namespace {

using torch::stable::Tensor;

constexpr int64_t kSlot = 512 << 10;          // bytes; longer tensors are summed piece by piece
constexpr int64_t kSummedWhole = 32 << 10;    // bytes: up to here each rank adds up everything
constexpr int64_t kPerThread = 32 << 10;      // elements: below this a thread is done before another one has begun

constexpr int64_t bytes_of(int64_t ranks) { return int64_t(sizeof(Header)) + 2 * ranks * kSlot; }

// The memory that the ranks of a group share.
class Group {
 public:
  Group(int file, int64_t rank, const std::vector<int64_t>& processes, int64_t spin)
      : bytes_(bytes_of(processes.size())),
        memory_(map(file, bytes_)),
        meeting_(reinterpret_cast<Header*>(memory_), rank, processes, std::chrono::microseconds(spin)) {
    // The first to write a page has it on its NUMA node.
    for (int turn = 0; turn < 2; ++turn) std::memset(slot(rank, turn), 0, kSlot);
  }
  ~Group() { munmap(memory_, bytes_); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  template <class T>
  void sum(T* numbers, int64_t count) {
    const std::lock_guard lock(mutex_);
    constexpr int64_t kPiece = kSlot / sizeof(T);
    for (int64_t begin = 0; begin < count; begin += kPiece) piece(numbers + begin, std::min(kPiece, count - begin));
  }

 private:
  static char* map(int file, int64_t bytes) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    STD_TORCH_CHECK(memory != MAP_FAILED, "the memory that ranks share cannot be mapped: ", std::strerror(errno));
    return static_cast<char*>(memory);
  }

  char* slot(int64_t rank, int turn) const { return memory_ + sizeof(Header) + (2 * rank + turn) * kSlot; }

  template <class T>
  T* numbers_of(int64_t rank) const {
    return reinterpret_cast<T*>(slot(rank, turn_));
  }

  template <class T>
  void piece(T* numbers, int64_t count) {
    const int64_t ranks = meeting_.ranks(), bytes = count * int64_t(sizeof(T));
    copy(numbers_of<T>(meeting_.rank()), numbers, count);
    meeting_.arrive(bytes);
    if (ranks == 2 || bytes <= kSummedWhole) {
      add_up(numbers, 0, count);
    } else {
      // Parts of whole cache lines. A rank's own part of its own slot is read by nobody else.
      const int64_t line = 64 / sizeof(T), part = (count / ranks + line) / line * line;
      const auto first = [&](int64_t rank) { return std::min(rank * part, count); };
      const int64_t own = meeting_.rank();
      add_up(numbers_of<T>(own) + first(own), first(own), first(own + 1));
      meeting_.arrive(bytes);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        copy(numbers + first(rank), numbers_of<T>(rank) + first(rank), first(rank + 1) - first(rank));
      }
    }
    turn_ ^= 1;
  }

  template <class T>
  static void copy(T* to, const T* from, int64_t count) {
    parallel_for(0, count, kPerThread, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, (end - begin) * sizeof(T));
    });
  }

  // The sums of all slots' elements from `first` to `last`, to `to`.
  template <class T>
  void add_up(T* to, int64_t first, int64_t last) const {
    const int64_t ranks = meeting_.ranks();
    parallel_for(first, last, kPerThread, [&](int64_t begin, int64_t end) {
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) {
        Floats sum = widen(numbers_of<T>(0) + i);
        for (int64_t rank = 1; rank < ranks; ++rank) sum = sum + widen(numbers_of<T>(rank) + i);
        narrow(to + (i - first), sum);
      }
      if (const int64_t rest = end - i; rest > 0) {
        Floats sum = widen_part(numbers_of<T>(0) + i, rest);
        for (int64_t rank = 1; rank < ranks; ++rank) sum = sum + widen_part(numbers_of<T>(rank) + i, rest);
        narrow_part(to + (i - first), sum, rest);
      }
    });
  }

  const int64_t bytes_;
  char* const memory_;
  Meeting meeting_;
  int turn_ = 0;
  std::mutex mutex_;
};

// The groups of this process by their numbers.
class Groups {
 public:
  static Groups& all() {
    static Groups* const groups = new Groups;  // interpreters end later than static objects
    return *groups;
  }

  void put(int64_t number, std::shared_ptr<Group> group) {
    const std::lock_guard lock(mutex_);
    groups_[number] = std::move(group);
  }

  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    groups_.erase(number);
  }

  std::shared_ptr<Group> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(number);
    STD_TORCH_CHECK(found != groups_.end(), "all_reduce: the ranks of group ", number, " share no memory");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Group>> groups_;
};

int64_t shared_bytes(int64_t ranks) { return bytes_of(ranks); }

void open_group(int64_t group, int64_t file, int64_t rank, const std::vector<int64_t>& processes, int64_t spin) {
  const auto count = int64_t(processes.size());
  STD_TORCH_CHECK(count >= 1 && count <= kMostRanks && rank >= 0 && rank < count, "no rank ", rank, " of ", count);
  Groups::all().put(group, std::make_shared<Group>(int(file), rank, processes, spin));
}

void close_group(int64_t group) { Groups::all().remove(group); }

void all_reduce(Tensor x, int64_t group) {
  const auto ranks = Groups::all().find(group);
  if (x.numel() == 0) return;  // on every rank
  Tensor packed = x.is_contiguous() ? x : torch::stable::contiguous(x);
  with_type(x.scalar_type(), "all_reduce", [&]<class T>(T) {
    ranks->sum(static_cast<T*>(packed.mutable_data_ptr()), packed.numel());
  });
  if (!x.is_contiguous()) torch::stable::copy_(x, packed);
}

}  // namespace
}  // namespace dlinfer::ranks

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("shared_bytes(int ranks) -> int");
  library.def("open_group(int group, int file, int rank, int[] processes, int spin) -> ()");
  library.def("close_group(int group) -> ()");
  library.def("all_reduce(Tensor(a!) x, int group) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CompositeExplicitAutograd, library) {
  library.impl("shared_bytes", TORCH_BOX(&dlinfer::ranks::shared_bytes));
  library.impl("open_group", TORCH_BOX(&dlinfer::ranks::open_group));
  library.impl("close_group", TORCH_BOX(&dlinfer::ranks::close_group));
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "all_reduce", TORCH_BOX(&dlinfer::ranks::all_reduce));
}
