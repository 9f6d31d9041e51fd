// How many threads a call is worth, learnt from the calls before it.
//
// A region ends when its last thread has come, and on a busy machine a thread may be late by a time
// slice of another program. A second thread pays if it saves more than it makes the caller wait: n
// threads save work · (1 - 1/n). The work of a call is its size times the seconds that earlier
// calls took for theirs. While calls run alone nothing is learnt about waiting, so what is expected
// of it fades, and threads are tried again.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace sparge {

inline int64_t nanoseconds_now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Of this thread, without what other programs took.
inline int64_t thread_nanoseconds() {
  timespec t;
  return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) ? 0
                                                    : int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Crew {
 public:
  // `size`: of a call, in any unit that grows as its work does.
  int64_t threads_for(double size, int64_t most) {
    const double work = size * per_size.load(std::memory_order_relaxed);
    if (most <= 1 || work <= 0.0) return most;
    if (late.load(std::memory_order_relaxed) <= work * (1.0 - 1.0 / double(most))) return most;
    move(&late, 0.0, 1.0 / 32);
    return 1;
  }
  // What a region took: the work of all its threads, and how long its end waited for the last one.
  void learn(double size, int64_t work, int64_t waited, int64_t threads) {
    if (size <= 0.0) return;
    move(&per_size, double(work) / size, 1.0 / 8);
    if (threads > 1) move(&late, double(waited), 1.0 / 8);
  }

 private:
  std::atomic<double> per_size{0.0}, late{0.0};  // nanoseconds

  // Calls of several threads may overwrite what another learnt.
  static void move(std::atomic<double>* x, double to, double share) {
    const double from = x->load(std::memory_order_relaxed);
    x->store(from == 0.0 ? to : from + share * (to - from), std::memory_order_relaxed);
  }
};

}  // namespace sparge
