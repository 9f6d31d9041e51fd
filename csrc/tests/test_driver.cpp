// The driver against a plain loop: order, dependencies, a thread that sleeps, tasks that fail.
//
// Needs neither Python nor torch; CMakeLists.txt here says how to run it.
#include <chrono>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../driver.h"

namespace {

using sparge::Driver;
using sparge::Job;

int failures = 0;
void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// Calls f on n threads, this one among them, as torch's parallel loop does.
template <class F>
void on_threads(int64_t n, const F& f) {
  std::vector<std::thread> others;
  for (int64_t i = 1; i < n; ++i) others.emplace_back(f);
  f();
  for (std::thread& t : others) t.join();
}
// One thread does everything, however many were asked for: the others never come.
template <class F>
void alone(int64_t, const F& f) {
  f();
}

// Each task adds up what all tasks of the phase before it wrote, in plain memory: a task that runs
// too early reads zeros, and a missing hand-over between threads is a race that TSan sees.
struct Sums : Job {
  std::vector<std::vector<int64_t>> sizes;                // [group][phase]
  std::vector<std::vector<std::vector<int64_t>>> result;  // and task
  std::vector<std::vector<int>> finished;
  int joined_phase = -1, n_joined = 0;
  bool goes_on = true;
  size_t bytes = 64;

  explicit Sums(std::vector<std::vector<int64_t>> n) : sizes(std::move(n)) {
    for (const auto& group : sizes) {
      result.emplace_back();
      finished.emplace_back(group.size());
      for (int64_t tasks : group) result.back().emplace_back(size_t(tasks));
    }
  }
  int64_t groups() const override { return int64_t(sizes.size()); }
  int phases() const override { return sizes.empty() ? 1 : int(sizes[0].size()); }
  int64_t tasks(int64_t g, int p) const override { return sizes[size_t(g)][size_t(p)]; }
  size_t scratch() const override { return bytes; }
  void run(int64_t g, int p, int64_t i, char* scratch) override {
    *reinterpret_cast<int64_t*>(scratch) = i;  // every thread has its own
    int64_t sum = 1 + i;
    for (int before = p - 1; before >= 0; --before) {
      for (int64_t x : result[size_t(g)][size_t(before)]) sum += x % 1000003;
      if (!result[size_t(g)][size_t(before)].empty()) break;
    }
    if (p == joined_phase + 1 && p > 0)
      for (const auto& other : finished) sum += 100 * other[size_t(joined_phase)];
    result[size_t(g)][size_t(p)][size_t(i)] = sum;
  }
  void finish(int64_t g, int p) override { ++finished[size_t(g)][size_t(p)]; }
  bool joins(int p) const override { return p == joined_phase; }
  bool join(int64_t set, int) override {
    ++n_joined;
    return goes_on || set != 0;
  }
};

// The same, group by group and task by task.
std::vector<std::vector<std::vector<int64_t>>> plain(Sums job) {
  for (int p = 0; p < job.phases(); ++p)
    for (int64_t g = 0; g < job.groups(); ++g) {
      char scratch[64];
      for (int64_t i = 0; i < job.tasks(g, p); ++i) job.run(g, p, i, scratch);
      job.finish(g, p);
    }
  return job.result;
}

void test_equals_a_plain_loop() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int64_t threads = round < 64 ? round + 1 : 1 + int64_t(random() % 8);
    const int phases = 1 + int(random() % 5);
    std::vector<std::vector<int64_t>> sizes(1 + random() % 7);
    for (auto& group : sizes)
      for (int p = 0; p < phases; ++p) group.push_back(int64_t(random() % 3 ? random() % 9 : 0));
    Sums job(sizes);
    if (round % 3 == 0) {  // the phases around a join have tasks
      job.joined_phase = int(random() % unsigned(phases));
      for (auto& group : job.sizes) group.assign(group.size(), 3);
      const int joined = job.joined_phase;
      job = Sums(job.sizes);
      job.joined_phase = joined;
    }
    const auto wanted = plain(job);
    Driver driver(&job);
    if (round % 5 == 4)
      driver.run(threads, [](int64_t n, const auto& f) { alone(n, f); });
    else
      driver.run(threads, [](int64_t n, const auto& f) { on_threads(n, f); });
    expect(job.result == wanted, "round " + std::to_string(round) + " differs from a plain loop");
    for (const auto& group : job.finished)
      for (int times : group) expect(times == 1, "a phase is finished once");
    if (job.joined_phase >= 0) expect(job.n_joined == 1, "a join is asked once");
  }
}

void test_a_join_can_end_the_call() {
  Sums job({{2, 3, 4}, {2, 3, 4}, {1, 1, 1}});
  job.joined_phase = 1;
  job.goes_on = false;
  Driver(&job).run(3, [](int64_t n, const auto& f) { on_threads(n, f); });
  for (const auto& group : job.result) {
    for (int64_t x : group[1]) expect(x > 0, "everything runs before a join");
    for (int64_t x : group[2]) expect(x == 0, "nothing runs after a join that ends the call");
  }
}

// Two groups a set: the first set ends at its join, the others go on, and do not wait for it.
struct Sets : Sums {
  using Sums::Sums;
  int64_t sets() const override { return groups() / 2; }
  int64_t set_of(int64_t g) const override { return g / 2; }
  int64_t set_start(int64_t set) const override { return 2 * set; }
  void run(int64_t g, int p, int64_t i, char*) override {
    if (p > joined_phase)
      for (int64_t other : {g / 2 * 2, g / 2 * 2 + 1})
        expect(finished[size_t(other)][size_t(joined_phase)] == 1, "a join waits for its set");
    result[size_t(g)][size_t(p)][size_t(i)] = 1;
  }
};
void test_sets_join_apart() {
  for (int64_t threads : {1, 2, 3, 8}) {
    Sets job({{2, 3, 4}, {5, 3, 4}, {1, 1, 1}, {2, 2, 2}, {1, 9, 1}, {3, 1, 2}});
    job.joined_phase = 1;
    job.goes_on = false;
    Driver(&job).run(threads, [](int64_t n, const auto& f) { on_threads(n, f); });
    expect(job.n_joined == 3, "each set is asked once");
    for (size_t g = 0; g < job.result.size(); ++g)
      for (int64_t x : job.result[g][2]) expect(x == int64_t(g >= 2), "only the first set ends");
  }
}

// A thread that is stopped in its task delays what reads that task, and nothing else.
struct Sleeper : Sums {
  std::atomic<int> others{0};
  using Sums::Sums;
  void run(int64_t g, int p, int64_t i, char* scratch) override {
    if (g == 0 && p == 0 && i == 0) {
      // All tasks of the other groups, and the other tasks of this phase: 3 · (4 + 4) + 3.
      for (int waited = 0; others < 27 && waited < 20000; ++waited)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      expect(others == 27, "the others did all that does not read the sleeping task");
    }
    Sums::run(g, p, i, scratch);
    ++others;
  }
};
void test_a_sleeping_thread_delays_only_its_readers() {
  Sleeper job({{4, 4}, {4, 4}, {4, 4}, {4, 4}});
  Sums same({{4, 4}, {4, 4}, {4, 4}, {4, 4}});
  Driver driver(&job);
  driver.run(2, [](int64_t n, const auto& f) { on_threads(n, f); });
  expect(job.result == plain(same), "and the results are the same");
}

struct Failing : Sums {
  std::atomic<int> entered{0}, left{0};
  using Sums::Sums;
  void run(int64_t g, int p, int64_t i, char* scratch) override {
    if (g == 1 && p == 1) throw std::runtime_error("task " + std::to_string(i));
    Sums::run(g, p, i, scratch);
  }
  void enter() override { ++entered; }
  void leave() override { ++left; }
};
void test_a_failing_task_ends_the_call() {
  for (int64_t threads : {1, 2, 5, 16}) {
    Failing job({{3, 3, 3}, {3, 3, 3}, {3, 3, 3}});
    std::string message;
    try {
      Driver(&job).run(threads, [](int64_t n, const auto& f) { on_threads(n, f); });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    expect(message.rfind("task ", 0) == 0, "the caller gets the error of the task");
    expect(job.entered == job.left, "and no thread stays behind");
  }
}

void test_no_memory() {
  Sums job({{3, 3}});
  job.bytes = size_t(1) << 60;
  bool refused = false;
  try {
    Driver(&job).run(2, [](int64_t n, const auto& f) { on_threads(n, f); });
  } catch (const std::bad_alloc&) {
    refused = true;
  }
  expect(refused, "scratch that nobody gets is an error");
}

void test_nothing_to_do() {
  Sums none({}), empty({{0, 0}, {0, 0}});
  Driver(&none).run(2, [](int64_t, const auto&) { expect(false, "no region without groups"); });
  Driver(&empty).run(2, [](int64_t n, const auto& f) { on_threads(n, f); });
  for (const auto& group : empty.finished)
    for (int times : group) expect(times == 1, "a phase without tasks is finished, too");
}

}  // namespace

int main() {
  test_equals_a_plain_loop();
  test_a_join_can_end_the_call();
  test_sets_join_apart();
  test_a_sleeping_thread_delays_only_its_readers();
  test_a_failing_task_ends_the_call();
  test_no_memory();
  test_nothing_to_do();
  if (!failures) std::printf("driver: all tests passed\n");
  return failures ? 1 : 0;
}
