// The threads that kernels share their work with, in place of torch's own (parallel_for of OpenMP).
//
// A decode step has a hundred kernels of a tenth of a millisecond each. OpenMP keeps a team for each thread that ever
// asked for one. If those are more than there are CPUs, as in a server, they sleep between kernels. Waking one takes 50
// us here, twice a kernel. This team is one for the process and stays awake from kernel to kernel.
#pragma once

#include <cstdint>

namespace dlinfer {

// The threads that a kernel of this thread may use, itself among them: torch.get_num_threads().
int64_t thread_count();

// Calls body(first, last) for ranges that cover begin to end, in parallel if threads are free. Only the last range may
// be shorter than `grain`. Threads get ranges by chance, so results must not depend on the thread. An exception of body
// is rethrown here after all ranges that had begun; the others are then left out.
// Any number of threads may call it at once. A call from a body does all the work in its own thread.
void share_work(int64_t begin, int64_t end, int64_t grain, void (*body)(const void*, int64_t, int64_t),
                const void* context);

// Announces that parallel_for will soon share out work along `bytes` of memory from `data` on. Until then idle threads
// prefetch some of their parts. Holds until the next call. Memory is prefetched, never read, so it may be freed at any
// time.
void will_share(const void* data, int64_t bytes);

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  const auto call = [](const void* context, int64_t first, int64_t last) {
    (*static_cast<const Body*>(context))(first, last);
  };
  share_work(begin, end, grain, call, &body);
}

}  // namespace dlinfer
