// Tasks on torch's own threads, handed out one at a time so that threads stay busy to the end.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "arena.h"
#include "isa.h"
#include "tensors.h"

namespace sparge {

inline const Kernels& kernels_of(int64_t isa) {
  int count;
  const Isa* all = isas(&count);
  in_range("isa", isa, 0, count - 1);
  if (!all[isa].available())
    refuse("isa ", isa, " is ", all[isa].name, ", which this machine does not have");
  return *all[isa].kernels;
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
    const Buffer buffer = allocate(scratch);
    if (!buffer) {
      failed = true;
      return;
    }
    kernels.enter();
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;)
      f(order ? order[i] : i, buffer.get());
    kernels.leave();
  });
  if (failed) refuse("no memory for the scratch of a thread, ", scratch, " bytes");
}

// The first of n rows that fails `good(row)`, or -1. `width` is the numbers in a row; a thread
// takes about 64k of them at a time.
template <class F>
int64_t first_bad_row(const Kernels& kernels, int64_t n, int64_t width, const F& good) {
  const int64_t rows = std::max<int64_t>(1, (int64_t(1) << 16) / width);
  std::atomic<int64_t> bad{n};
  run_tasks(kernels, blocks_of(n, rows), 64, nullptr, [&](int64_t task, char*) {
    for (int64_t row = task * rows; row < std::min(n, (task + 1) * rows); ++row) {
      if (good(row)) continue;
      for (int64_t seen = bad; row < seen && !bad.compare_exchange_weak(seen, row);) continue;
      return;
    }
  });
  return bad < n ? bad.load() : -1;
}

// Whether a list holds its count of key blocks, ascending.
inline bool is_list(int64_t count, const int32_t* list, int64_t n_k) {
  if (count < 0 || count > n_k) return false;
  if (count == 0) return true;
  bool ascending = list[0] >= 0 && list[count - 1] < n_k;
  for (int64_t j = 1; j < count; ++j) ascending &= list[j - 1] < list[j];
  return ascending;
}

inline void check_lists(const Kernels& k, const int32_t* counts, const int32_t* indices, int64_t n,
                        int64_t n_k) {
  const int64_t row = first_bad_row(
      k, n, n_k, [&](int64_t i) { return is_list(counts[i], indices + i * n_k, n_k); });
  if (row < 0) return;
  in_range("counts", counts[row], 0, n_k);
  refuse("indices must be ascending key blocks in 0 … ", n_k - 1, "; list ", row, " of ", n,
         " is not");
}

// The first step that keeps each block, [B, Hq, n_q, n_k]: -1 … n_steps.
inline const int32_t* read_steps(const Kernels& k, Arguments* arguments, const Tensor& first_steps,
                                 const Shape& s, int n_steps) {
  const int64_t n_k = s.n_k(), n = s.B * s.Hq * s.n_q();
  const int32_t* steps =
      arguments->read<int32_t>("first_steps", first_steps, {s.B, s.Hq, s.n_q(), n_k});
  const int64_t row = first_bad_row(k, n, n_k, [&](int64_t i) {
    bool valid = true;
    for (int64_t j = i * n_k; j < (i + 1) * n_k; ++j)
      valid &= steps[j] >= -1 && steps[j] <= n_steps;
    return valid;
  });
  if (row >= 0) refuse("first_steps must be in -1 … ", n_steps, "; row ", row, " is not");
  return steps;
}

// The token mask of a call, with the values of `kinds` checked.
inline TokenMask tokens_of(const Kernels& k, Arguments* arguments, const MaybeTensor& mask,
                           const MaybeTensor& kinds, bool is_causal, int64_t offset,
                           const Shape& s) {
  const TokenMask t = arguments->tokens(mask, kinds, is_causal, offset, s);
  if (!kinds) return t;
  const int64_t width = s.n_k(), n = kinds->numel() / width;
  const int64_t row = first_bad_row(k, n, width, [&](int64_t i) {
    bool valid = true;
    for (int64_t j = i * width; j < (i + 1) * width; ++j)
      valid &= t.kinds[j] >= kExcluded && t.kinds[j] <= kOpen;
    return valid;
  });
  if (row >= 0) refuse("kinds must be 0, 1 or 2; row ", row, " of ", n, " has another number");
  return t;
}

}  // namespace sparge
