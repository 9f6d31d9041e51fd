// Tasks on torch's own threads, handed out one by one so that long ones do not wait in line.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "isa.h"

namespace sparge {

inline const Kernels& kernels_of(int64_t isa) {
  int count;
  const Isa* all = isas(&count);
  STD_TORCH_CHECK(isa >= 0 && isa < count && all[isa].available(),
                  "sparge: no such instruction set");
  return *all[isa].kernels;
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Room = std::unique_ptr<char, Free>;
inline Room make_room(size_t bytes) {
  return Room(static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
}

// f(task, scratch) for every task; `order` gives their order where it matters.
template <class F>
void run_tasks(const Kernels& kernels, int64_t n, size_t scratch, const int64_t* order,
               const F& f) {
  if (n == 0) return;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const int64_t threads = torch::stable::get_num_threads();
  torch::stable::parallel_for(0, threads < n ? threads : n, 1, [&](int64_t, int64_t) {
    const Room room = make_room(scratch);
    if (!room) {
      failed = true;
      return;
    }
    kernels.enter();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
      f(order ? order[i] : i, room.get());
    kernels.leave();
  });
  STD_TORCH_CHECK(!failed, "sparge: no memory for the scratch of a thread, ", scratch, " bytes");
}

}  // namespace sparge
