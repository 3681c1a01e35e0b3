// Work items on XLA's own threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace pagedjax {

// Runs fn(i, later) for each i below count, once, in this order of starting, and waits for them; `later` is what the same
// thread runs next, or -1. The calling thread takes part and could do all of it alone: a pool whose threads are all waiting
// in calls like this one cannot lock up.
inline void ParallelFor(xla::ffi::ThreadPool& pool, int count, const std::function<void(int, int)>& fn) {
  struct Shared {
    std::atomic<int> next{0};
    int done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  // Helpers that start late find nothing to do, but the counter has to be there for them.
  auto shared = std::make_shared<Shared>();
  // Towards the end nothing is claimed ahead, so that no thread idles while another holds two items.
  const int ahead_until = count - 2 * (static_cast<int>(pool.num_threads()) + 1);
  auto work = [shared, count, ahead_until](const std::function<void(int, int)>* fn) {
    int mine = 0;
    for (int i = shared->next.fetch_add(1); i < count; mine++) {
      const int later = i < ahead_until ? shared->next.fetch_add(1) : -1;
      (*fn)(i, later < count ? later : -1);
      i = later < 0 ? shared->next.fetch_add(1) : later;
    }
    if (!mine) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done += mine;
    if (shared->done == count) shared->all_done.notify_all();
  };
  int helpers = static_cast<int>(pool.num_threads());
  if (helpers > count - 1) helpers = count - 1;
  const std::function<void(int, int)>* function = &fn;
  for (int i = 0; i < helpers; i++) pool.Schedule([work, function] { work(function); });
  work(function);
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == count; });
}

}  // namespace pagedjax
