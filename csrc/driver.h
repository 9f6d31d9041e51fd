// One parallel region for a whole call: tasks in groups, each group in phases.
//
// A group is what must be computed in order, such as a key head; groups do not wait for each other.
// The tasks of a phase may run when all tasks of the group's earlier phases are done. Workers take
// tasks group by group, and take one of a later group where the earlier ones have none that may
// run: a head is attended while another is still being planned. No task belongs to a thread. If all
// others are stopped, one thread does everything; a stopped thread delays only what reads its task.
//
// This file knows neither torch nor threads: `parallel(n, f)` calls f on up to n threads, the
// caller's among them, and returns when all calls have. csrc/tests runs it under sanitizers.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <thread>

namespace sparge {

// What a driver runs. Functions may be called by any thread, `run` by several at once.
struct Job {
  virtual ~Job() = default;
  virtual int64_t groups() const = 0;
  virtual int phases() const = 0;
  virtual int64_t tasks(int64_t group, int phase) const = 0;
  virtual size_t scratch() const = 0;  // bytes of one thread
  virtual void run(int64_t group, int phase, int64_t task, char* scratch) = 0;
  // After the last task of a phase, before the next phase begins; by one thread.
  virtual void finish(int64_t group, int phase) {}
  // Groups that have something in common, such as the heads of one sequence, are a set. Where a
  // phase joins, no group of a set begins the next one before all of them have finished it; then
  // `join`, by one thread, says whether the set goes on. Phases around a join have tasks.
  virtual int64_t sets() const { return 1; }
  virtual int64_t set_of(int64_t group) const { return 0; }
  virtual int64_t set_start(int64_t set) const { return set * groups(); }  // its first group
  virtual bool joins(int phase) const { return false; }
  virtual bool join(int64_t set, int phase) { return true; }
  virtual void enter() {}  // of each thread, before and after its tasks
  virtual void leave() {}
};

class Driver {
 public:
  explicit Driver(Job* job)
      : job(*job),
        n_groups(job->groups()),
        n_phases(job->phases()),
        groups(new Group[size_t(n_groups)]),
        joining(new std::atomic<int64_t>[size_t(job->sets() * n_phases)]) {
    for (int64_t i = 0; i < job->sets() * n_phases; ++i) joining[size_t(i)] = 0;
    for (int64_t g = 0; g < n_groups; ++g)
      for (int p = 0; p < n_phases; ++p) ++joining[size_t(job->set_of(g) * n_phases + p)];
  }

  // Runs everything, or throws what a task threw. std::bad_alloc if no thread has its scratch.
  template <class Parallel>
  void run(int64_t threads, const Parallel& parallel) {
    if (n_groups == 0) return;
    int64_t all = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
      for (int p = 0; p < n_phases; ++p) groups[size_t(g)].total += job.tasks(g, p);
      all += groups[size_t(g)].total;
    }
    for (int64_t g = 0; g < n_groups; ++g) open(g, 0);
    parallel(threads < all ? threads : all, [this] { work(); });
    if (error) std::rethrow_exception(error);
    if (!finished()) throw std::bad_alloc();
  }

 private:
  struct alignas(64) Group {
    int64_t total = 0;                // tasks of all phases
    std::atomic<int64_t> next{0};     // of them, the first that nobody has taken
    std::atomic<int64_t> done{0};     // how many are done
    std::atomic<int64_t> may_run{0};  // tasks of the phases that have begun
  };
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };

  Job& job;
  const int64_t n_groups;
  const int n_phases;
  const std::unique_ptr<Group[]> groups;
  // [sets][phases] groups that have not finished a phase
  const std::unique_ptr<std::atomic<int64_t>[]> joining;
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  bool finished() const {
    for (int64_t g = 0; g < n_groups; ++g)
      if (groups[size_t(g)].done != groups[size_t(g)].total) return false;
    return true;
  }

  // The tasks of a phase may run from here on. Called by one thread at a time for a group.
  void open(int64_t g, int phase) {
    while (phase < n_phases) {
      if (const int64_t n = job.tasks(g, phase)) {
        groups[size_t(g)].may_run.fetch_add(n, std::memory_order_release);
        return;
      }
      if (!close(g, phase)) return;
      ++phase;
    }
  }
  // A phase of a group is done; whether its next phase may begin.
  bool close(int64_t g, int phase) {
    job.finish(g, phase);
    if (!job.joins(phase)) return true;
    const int64_t set = job.set_of(g);
    auto& left = joining[size_t(set * n_phases + phase)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    const bool goes_on = job.join(set, phase);
    for (int64_t i = job.set_start(set); i < job.set_start(set + 1); ++i) {
      Group& group = groups[size_t(i)];
      if (goes_on) {
        open(i, phase + 1);
      } else {  // as if all its tasks were taken and done
        group.done = group.total;
        group.next = group.total;
      }
    }
    return false;
  }

  int phase_of(int64_t g, int64_t* task) const {
    int phase = 0;
    for (int64_t n; *task >= (n = job.tasks(g, phase)); ++phase) *task -= n;
    return phase;
  }

  // Takes a task of a group that may run; -1 if there is none.
  int64_t take(Group* group) {
    int64_t i = group->next.load(std::memory_order_relaxed);
    while (i < group->may_run.load(std::memory_order_acquire))
      if (group->next.compare_exchange_weak(i, i + 1, std::memory_order_relaxed)) return i;
    return -1;
  }

  void run_task(int64_t g, int64_t number, char* scratch) {
    int64_t task = number;
    const int phase = phase_of(g, &task);
    job.run(g, phase, task, scratch);
    // The last task of a phase: all others are done, or they would not have been counted.
    const int64_t first = number - task,
                  done = 1 + groups[size_t(g)].done.fetch_add(1, std::memory_order_acq_rel);
    if (done != first + job.tasks(g, phase)) return;
    if (close(g, phase)) open(g, phase + 1);
  }

  void work() {
    const std::unique_ptr<char, Free> scratch(
        static_cast<char*>(std::aligned_alloc(64, (job.scratch() + 127) / 64 * 64)));
    if (!scratch) return;  // the others do its part
    job.enter();
    int64_t first = 0;  // groups before it have no task left to take
    for (int waited = 0; !failed;) {
      while (first < n_groups && groups[size_t(first)].next >= groups[size_t(first)].total) ++first;
      if (first == n_groups) break;
      int64_t g = first, number = -1;
      for (; g < n_groups; ++g)
        if ((number = take(&groups[size_t(g)])) >= 0) break;
      if (number < 0) {
        wait(waited++);
        continue;
      }
      waited = 0;
      try {
        run_task(g, number, scratch.get());
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
    job.leave();
  }

  // Some microseconds of spinning; then whoever shares the core goes first.
  static void wait(int waited) {
    constexpr int kSpins = 64, kPauses = 16;
    if (waited >= kSpins) return std::this_thread::yield();
    for (int i = 0; i < kPauses; ++i)
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#else
      std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }
};

}  // namespace sparge
