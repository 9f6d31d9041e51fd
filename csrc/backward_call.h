// The gradient as tasks of one driver. A group is a key head with its query heads. Its phases:
//   lists    the caller's lists are checked, kinds of blocks found; then the readers of key blocks
//   queries  by query blocks, long lists first: dq, row sums, what the second filter skipped
//   keys     by key blocks, over their readers: dk and dv. No two tasks add to the same sum.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "arena.h"
#include "block_kinds.h"
#include "driver.h"

namespace sparge {
namespace {

class BackwardCall : public Job {
 public:
  // mask_b, mask_h: sizes of the mask; 0 without one.
  BackwardCall(const Kernels& kernels, const BackwardArgs& args, int64_t mask_b, int64_t mask_h)
      : k(kernels), a(args), s(a.shape), kinds{s, mask_b, mask_h}, heads(s.B * s.Hk) {
    n_q = s.n_q(), n_k = s.n_k();
    lay_out(nullptr);
    memory = allocate(bytes);
    if (!memory) throw std::bad_alloc();
    lay_out(memory.get());
    order.resize(size_t(s.B * s.Hq * n_q));
  }

  int64_t groups() const override { return heads; }
  int phases() const override { return 3; }
  size_t scratch() const override { return k.backward_scratch(a); }
  void enter() override { k.enter(); }
  void leave() override { k.leave(); }
  int64_t tasks(int64_t g, int phase) const override {
    if (phase == 0) return 1 + kind_tasks(g + 1) - kind_tasks(g);
    return phase == 1 ? s.group() * n_q : n_k;
  }
  void run(int64_t g, int phase, int64_t i, char* scratch) override {
    const int64_t first = g * s.group() * n_q;
    if (phase == 0 && i == 0) {
      check_lists(a.counts, a.indices, first, first + s.group() * n_q, n_k);
      const auto begin = order.begin() + first, end = begin + s.group() * n_q;
      std::iota(begin, end, first);
      std::stable_sort(begin, end, [&](int64_t x, int64_t y) { return a.counts[x] > a.counts[y]; });
    } else if (phase == 0) {
      kinds.run(a.tokens, kind_tasks(g) + i - 1, found_kinds);
    } else if (phase == 1) {
      k.backward_query(a, order[size_t(first + i)], scratch);
    } else {
      k.backward_key(a, g * n_k + i, scratch);
    }
  }
  bool joins(int phase) const override { return phase == 0; }
  bool join(int64_t, int) override {
    find_readers();
    if (kinds.B) kinds.attach(found_kinds, &a.tokens);
    return true;
  }

 private:
  const Kernels& k;
  BackwardArgs a;
  const Shape& s;
  const KindMap kinds;
  const int64_t heads;
  int64_t n_q, n_k;
  int8_t* found_kinds = nullptr;
  Buffer memory;
  size_t bytes = 0;
  std::vector<int64_t> order, start, readers;

  int64_t kind_tasks(int64_t g) const { return kinds.tasks_before(a.tokens, g, heads); }

  void lay_out(char* base) {
    Arena arena{base};
    a.shift = arena.take<float>(size_t(s.B * s.Hq * s.Lq));
    a.row_sum = arena.take<float>(size_t(s.B * s.Hq * s.Lq));
    a.skipped = arena.take<uint8_t>(size_t(s.B * s.Hq * n_q * n_k));
    found_kinds = arena.take<int8_t>(size_t(kinds.size()));
    bytes = arena.used;
  }

  // The readers of each key block, in the order of heads and query blocks: sums have one order.
  void find_readers() {
    start.assign(size_t(heads * n_k + 1), 0);
    auto each = [&](auto f) {
      for (int64_t task = 0; task < s.B * s.Hq * n_q; ++task)
        for (int32_t i = 0; i < a.counts[task]; ++i)
          f(task, task / n_q / s.group() * n_k + a.indices[task * n_k + i]);
    };
    each([&](int64_t, int64_t block) { ++start[size_t(block + 1)]; });
    std::partial_sum(start.begin(), start.end(), start.begin());
    readers.resize(size_t(start.back()));
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    each([&](int64_t task, int64_t block) { readers[size_t(next[size_t(block)]++)] = task; });
    a.readers_start = start.data();
    a.readers = readers.data();
  }
};

}  // namespace
}  // namespace sparge
