// Waiting for a result that another thread is computing.
#pragma once

#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dlinfer {

// Tells the processor that this thread only waits.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Waits until `ready` returns true, at first without yielding the processor.
template <class Ready>
void wait_for(const Ready& ready) {
  for (int tries = 0; !ready(); ++tries) {
    if (tries > 1000) {
      std::this_thread::yield();
    } else {
      pause();
    }
  }
}

}  // namespace dlinfer
