// The error of each step of an error budget, measured on some rows of one head, 16 to a group.
//
//   acc[l]    = Σ p · v over the blocks that step l is the first to keep, l = n_steps for the rest
//   out_s     = Σ_{l <= s} acc[l] / Σ_{l <= s} sum[l]
//   wrong[s]  = Σ_rows |out_s - out_all|,  whole = Σ_rows |out_all|
//
// One pass over K and V serves all steps. Scores have a row per lane. The sums are [row][step]
// [width], because a block may belong to different steps in different rows: each row adds its P · V
// to the sum of its own step.
#pragma once

#include "arena.h"
#include "score.h"

namespace sparge {
namespace {

constexpr int kMaxBudgetGroups = 4;  // groups of 16 rows that share one pass over K and V

// Rows of P, [key][16], times 16 channels of V, each row added to its own sums. Not inlined, for
// the same reason as product_panel.
SPARGE_NOINLINE inline void add_weighted_values(const float* p, const float* v, int64_t pitch,
                                                float* const* sums, int64_t d) {
  F32x16 acc[kRowsAtOnce];
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) acc[m] = load(sums[m] + d);
  for (int j = 0; j < kBlockK; ++j) {
    const F32x16 x = load(v + j * pitch + d);
#pragma GCC unroll 16
    for (int m = 0; m < kRowsAtOnce; ++m)
      acc[m] = mad_f32(acc[m], reinterpret_cast<const char*>(p + j * kLanes + m), x);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) store(sums[m] + d, acc[m]);
}

struct StepErrors {
  const BudgetArgs& a;
  const Shape& s;
  int64_t b, h, first, n_groups, all_groups, width;
  // In the thread's scratch.
  float *queries, *scores, *values, *discarded;
  float *acc, *sums;  // of each group, row and step
  char* keys;
  size_t scratch_bytes;

  StepErrors(const BudgetArgs& args, int64_t task, char* scratch)
      : a(args), s(args.shape), width(round_up(args.shape.Dv, kLanes)) {
    all_groups = (a.n_checked + kLanes - 1) / kLanes;
    const int64_t per_head = (all_groups + a.groups_per_task - 1) / a.groups_per_task;
    first = task % per_head * a.groups_per_task;
    n_groups = all_groups - first < a.groups_per_task ? all_groups - first : a.groups_per_task;
    h = task / per_head % s.Hq;
    b = task / per_head / s.Hq;
    using Scores = RowScores<Product::f32>;
    const size_t groups = size_t(a.groups_per_task), w = size_t(width);
    const size_t rows_of_steps = groups * kLanes * size_t(a.n_steps + 1);
    Arena arena{scratch};
    queries = arena.take<float>(groups * Scores::query_floats(s));
    scores = arena.take<float>(Scores::kScoreFloats);
    values = arena.take<float>(kBlockK * w);
    discarded = arena.take<float>(kRowsAtOnce * w);
    acc = arena.take<float>(rows_of_steps * w);
    sums = arena.take<float>(rows_of_steps);
    keys = arena.take<char>(Scores::key_bytes(s));
    scratch_bytes = arena.used;
  }

  const int64_t* rows_of(int64_t group) const { return a.checked + (first + group) * kLanes; }
  int rows_in(int64_t group) const {
    const int64_t left = a.n_checked - (first + group) * kLanes;
    return int(left < kLanes ? left : kLanes);
  }
  float* acc_of(int64_t group, int row, int step) const {
    return acc + ((group * kLanes + row) * (a.n_steps + 1) + step) * width;
  }
  float* sums_of(int64_t group, int row) const {
    return sums + (group * kLanes + row) * (a.n_steps + 1);
  }

  template <Product P>
  void accumulate() {
    RowScores<P> rows[kMaxBudgetGroups];
    GroupState states[kMaxBudgetGroups];
    for (int64_t g = 0; g < n_groups; ++g) {
      rows[g].begin(a, b, h, rows_of(g), rows_in(g),
                    queries + size_t(g) * RowScores<P>::query_floats(s), scores);
      store(states[g].row_max, broadcast(-INFINITY));
      store(states[g].shift, zero());
      store(states[g].row_sum, zero());
    }
    std::memset(discarded, 0, size_t(width) * kRowsAtOnce * 4);
    std::memset(acc, 0, size_t(n_groups * (a.n_steps + 1) * width) * kLanes * 4);
    std::memset(sums, 0, size_t(n_groups * (a.n_steps + 1)) * kLanes * 4);
    for (int64_t j = 0; j < s.n_k(); ++j) {
      Words key{};
      const float* value = nullptr;
      int64_t pitch = width;
      for (int64_t g = 0; g < n_groups; ++g) {
        const Kind kind = rows[g].kind(j);
        if (kind == kExcluded) continue;
        if (!key.data) {
          key = rows[g].key(j, keys);
          value = value_rows(rows[g].h_k, j, &pitch);
        }
        const F32x16 most = rows[g].score(key, j, kind);
        if (needs_rescale(states[g], most)) rescale(g, move_shift(&states[g], most));
        store(states[g].row_max, max_or_nan(load(states[g].row_max), most));
        const F32x16 sum = exponentials<Product::f32, 6>(scores, 0, kBlockK, load(states[g].shift),
                                                         scores, zero());
        add_to_steps(g, j, sum, value, pitch);
      }
    }
  }

  void rescale(int64_t group, F32x16 factors) {
    alignas(64) float factor[kLanes];
    store(factor, factors);
    for (int i = 0; i < rows_in(group); ++i) {
      if (factor[i] == 1.0f) continue;
      float *row_acc = acc_of(group, i, 0), *row_sums = sums_of(group, i);
      for (int64_t d = 0; d < (a.n_steps + 1) * width; d += kLanes)
        store(row_acc + d, load(row_acc + d) * broadcast(factor[i]));
      for (int step = 0; step <= a.n_steps; ++step) row_sums[step] *= factor[i];
    }
  }

  // One block of V as fp32 rows, `pitch` numbers from each other; in place where possible.
  const float* value_rows(int64_t h_k, int64_t i_k, int64_t* pitch) const {
    const int64_t start = i_k * kBlockK, n = s.Lk - start < kBlockK ? s.Lk - start : kBlockK;
    const char* in_place = a.value.row(b, h_k, start);
    if (n == kBlockK && s.Dv == width && a.value.dtype == Dtype::f32 && has_dense_rows(a.value)) {
      *pitch = a.value.stride_l / 4;
      return reinterpret_cast<const float*>(in_place);
    }
    *pitch = width;
    for (int64_t j = 0; j < n; ++j)
      read_row(a.value, a.value.row(b, h_k, start + j), s.Dv, values + j * width);
    std::memset(values + n * width, 0, size_t((kBlockK - n) * width) * 4);
    return values;
  }

  void add_to_steps(int64_t group, int64_t i_k, F32x16 sum, const float* value, int64_t pitch) {
    alignas(64) float own_sum[kLanes];
    store(own_sum, sum);
    for (int first_row = 0; first_row < rows_in(group); first_row += kRowsAtOnce) {
      float* into[kRowsAtOnce];
      for (int m = 0; m < kRowsAtOnce; ++m) {
        const int i = first_row + m;
        into[m] = discarded + m * width;
        if (i >= rows_in(group)) continue;
        const int64_t i_q = rows_of(group)[i] / kBlockQ;
        const int32_t step = a.first_steps[((b * s.Hq + h) * s.n_q() + i_q) * s.n_k() + i_k];
        if (step < 0) continue;  // a block that the row's query block may not attend
        into[m] = acc_of(group, i, step);
        sums_of(group, i)[step] += own_sum[i];
      }
      for (int64_t d = 0; d < width; d += kLanes)
        add_weighted_values(scores + first_row, value, pitch, into, d);
    }
  }

  // Turns the sums of steps into running sums, outputs, and differences of outputs.
  void finish(int64_t group) {
    const int64_t at = (b * s.Hq + h) * all_groups + first + group;
    double* wrong = a.wrong + at * a.n_steps;
    a.whole[at] = 0.0;
    for (int step = 0; step < a.n_steps; ++step) wrong[step] = 0.0;
    for (int i = 0; i < rows_in(group); ++i) {
      float* row_sums = sums_of(group, i);
      for (int step = 1; step <= a.n_steps; ++step) {
        float *own = acc_of(group, i, step), *before = acc_of(group, i, step - 1);
        for (int64_t d = 0; d < width; d += kLanes)
          store(own + d, load(own + d) + load(before + d));
        row_sums[step] += row_sums[step - 1];
      }
      const F32x16 inverse = inverse_of(row_sums[a.n_steps]);
      const float* every = acc_of(group, i, a.n_steps);
      F32x16 size = zero();
      for (int64_t d = 0; d < width; d += kLanes) size = size + abs(load(every + d) * inverse);
      a.whole[at] += add_lanes(size);
      for (int step = 0; step < a.n_steps; ++step) {
        const F32x16 own_inverse = inverse_of(row_sums[step]);
        const float* own = acc_of(group, i, step);
        F32x16 off = zero();
        for (int64_t d = 0; d < width; d += kLanes)
          off = off + abs(load(own + d) * own_inverse - load(every + d) * inverse);
        wrong[step] += add_lanes(off);
      }
    }
  }
  // 1 / sum; 0 for a row that attends nothing.
  static F32x16 inverse_of(float sum) { return sum == 0.0f ? zero() : broadcast(1.0f / sum); }
  static double add_lanes(F32x16 x) {
    alignas(64) float lanes[kLanes];
    store(lanes, x);
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i) total += double(lanes[i]);
    return total;
  }

  void run() {
    with_row_product(a,
                     [&](auto product) { this->template accumulate<decltype(product)::value>(); });
    for (int64_t g = 0; g < n_groups; ++g) finish(g);
  }
};

}  // namespace
}  // namespace sparge
