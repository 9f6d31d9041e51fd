// An error budget as tasks of a call: how far queries are from the mean of their block, the rows to
// survey, the mass that each step drops from them, the rows to measure, the errors of steps on
// them; then every head takes a step. Rules and their numbers are those of rules/error_budget.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "arena.h"
#include "budget_decision.h"
#include "budget_rows.h"
#include "work.h"

namespace sparge {
namespace {

// The mean of each step, its standard error, and the largest weight x mass, in the order of rows.
inline void summarize(const float* dropped, const int64_t* rows, const double* weights, int64_t n,
                      int n_steps, double* mean, double* deviation, double* heaviest) {
  std::fill(mean, mean + n_steps, 0.0);
  std::fill(deviation, deviation + n_steps, 0.0);
  std::fill(heaviest, heaviest + n_steps, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || weights[i] == 0.0) continue;
    for (int step = 0; step < n_steps; ++step) {
      const double x = weights[i] * double(dropped[i * n_steps + step]);
      mean[step] += x;
      const double most = heaviest[step];  // NaN is the largest of all
      heaviest[step] = x <= most || most != most ? most : x;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || weights[i] == 0.0) continue;
    for (int step = 0; step < n_steps; ++step) {
      const double off = weights[i] * (double(dropped[i * n_steps + step]) - mean[step]);
      deviation[step] += off * off;
    }
  }
  for (int step = 0; step < n_steps; ++step) deviation[step] = std::sqrt(deviation[step]);
}

class ErrorBudget {
 public:
  ErrorBudget(const Kernels& kernels, const Work& work, int64_t threads)
      : k(kernels),
        w(work),
        s(work.shape),
        counts(work.steps, *work.rules, s.n_q()),
        blocks(checked_blocks(s.Lq, work.sample_rows, *work.rules, counts)),
        curves(size_t(s.B * s.Hq)) {
    heads = s.B * s.Hq;
    n = int64_t(blocks.size()) * counts.most;
    m = int64_t(w.rules->measured_rows);
    // Groups of rows that share the packing of K and V, as long as every thread has a task.
    auto rows_of_task = [&](int64_t rows) {
      const int64_t groups = heads * ((rows + kLanes - 1) / kLanes);
      return std::clamp<int64_t>(groups / (2 * threads), 1, kMaxCheckGroups) * kLanes;
    };
    survey_rows = rows_of_task(n), measure_rows = rows_of_task(m);
    slots[0] = 0;  // of first step -1: pooled entries of such a block are never read
    for (int i = 0, step = 0; step <= w.steps.n_steps; ++step) {
      slots[step + 1] = i;
      if (i < w.steps.n_measured && step == w.steps.measured[i]) ++i;
    }
  }

  // Survey and measurement read the operands of the call, which are placed by now.
  void lay_out(Arena* arena, const ScoreArgs& scored, const AttendArgs& attend,
               const float* entry_values) {
    const int64_t S = w.steps.n_steps, C = w.steps.n_measured;
    at = w.places;
#define SPARGE_PLACE(name, type, ...) \
  at.name = placed(arena, at.name, true, numbers_in(__VA_ARGS__));
    SPARGE_BUDGET_PLACES(SPARGE_PLACE)
#undef SPARGE_PLACE
    static_cast<ScoreArgs&>(survey_args) = scored;
    survey_args.first_steps = w.indices;
    survey_args.n_steps = int(S);
    survey_args.dropped = at.dropped;
    static_cast<SurveyArgs&>(measure_args) = survey_args;
    BudgetArgs& a = measure_args;
    a.slots = slots + 1;
    a.n_slots = int(C);
    if (w.precision != Precision::exact && w.precision != w.own_precision()) {
      a.exact = scored;
      a.exact.q_scale = a.exact.k_scale = Scales{};
      a.exact.query = w.query, a.exact.key = w.key;
      // 16-bit numbers are multiplied as they are; fp32 must not be rounded to them.
      a.exact.precision = w.query.dtype == Dtype::bf16 ? Precision::half : Precision::exact;
    }
    a.value = w.value;
    if (w.fast()) a.codes = attend.value, a.v_scale = attend.v_scale;
    if (attend.pooled) {
      a.pool_group = attend.pool_group;
      a.pooled = scored;
      a.pooled.tokens = TokenMask{};
      a.pooled.shape.Lk = attend.pooled->shape.Lk;
      a.pooled.key = attend.pooled->key;
      a.pooled.k_scale = attend.pooled->k_scale;
      a.pooled_value = attend.pooled->value;
      if (w.fast()) {  // as numbers
        a.pooled_value.data = reinterpret_cast<const char*>(entry_values);
        a.pooled_value.dtype = Dtype::f32;
        for (int64_t* stride : {&a.pooled_value.stride_b, &a.pooled_value.stride_h,
                                &a.pooled_value.stride_l, &a.pooled_value.stride_d})
          *stride *= 4;
      }
    }
    a.skipping = at.skipping, a.total = at.total, a.whole = at.whole;
  }
  size_t scratch() {
    RowTask any{};
    any.n = int(kMaxCheckGroups * kLanes);
    survey_args.tasks = measure_args.tasks = &any;
    return std::max(k.survey_scratch(survey_args), k.budget_scratch(measure_args));
  }

  // Tasks of one head.
  int64_t survey_tasks() const { return (n + survey_rows - 1) / survey_rows; }
  int64_t measure_tasks() const { return (m + measure_rows - 1) / measure_rows; }

  void find_deviations(int64_t query_block) const {
    k.deviations({w.query, s.Hq, s.Lq, s.D, at.deviation, at.energy}, query_block);
  }
  void choose(int64_t head) const {
    choose_rows(at.deviation + head * s.Lq, at.energy + head * s.n_q(), s.Lq,
                w.amount[head % s.Hq] < w.rules->small_budget, blocks, counts,
                at.surveyed + head * n, weights_of(0, head), weights_of(1, head));
    const int64_t size = n * w.steps.n_steps;
    std::fill_n(at.dropped + head * size, size, 0.0f);
  }
  void survey(int64_t head, int64_t task, char* scratch) const {
    SurveyArgs a = survey_args;
    const RowTask rows = rows_of(at.surveyed + head * n, n, head, task, survey_rows);
    if (!rows.n) return;
    a.tasks = &rows;
    k.survey(a, 0, scratch);
  }
  void draw(int64_t head) const {
    const int64_t S = w.steps.n_steps;
    const float* dropped = at.dropped + head * n * S;
    const double *base = weights_of(0, head), *every = weights_of(1, head);
    for (int kind = 0; kind < 2; ++kind) {
      if (kind && std::equal(base, base + n, every))
        for (int x = 0; x < 3; ++x) std::copy_n(fact(x, 0, head), S, fact(x, 1, head));
      else
        summarize(dropped, at.surveyed + head * n, kind ? every : base, n, int(S),
                  fact(0, kind, head), fact(1, kind, head), fact(2, kind, head));
    }
    const int64_t C = w.steps.n_measured;
    draw_measured({n, S, at.surveyed + head * n, base, dropped, fact(0, 0, head)}, *w.rules,
                  w.steps, at.drawn + head * m, at.drawn_weights + head * m,
                  at.drawn_dropped + head * m * C);
    std::fill_n(at.skipping + head * m * C, m * C, 0.0);
    std::fill_n(at.total + head * m * (C + 1), m * (C + 1), 0.0);
    std::fill_n(at.whole + head * m, m, 0.0);
  }
  void measure(int64_t head, int64_t task, char* scratch) const {
    BudgetArgs a = measure_args;
    const RowTask rows = rows_of(at.drawn + head * m, m, head, task, measure_rows);
    if (!rows.n) return;
    a.tasks = &rows;
    k.budget(a, 0, scratch);
  }
  void find_curves(int64_t head) {
    const int64_t C = w.steps.n_measured;
    HeadFacts f{};
    f.n_steps = w.steps.n_steps, f.n_measured = C, f.m = m;
    for (int kind = 0; kind < 2; ++kind)
      f.mean[kind] = fact(0, kind, head), f.deviation[kind] = fact(1, kind, head),
      f.heaviest[kind] = fact(2, kind, head);
    f.skipping = at.skipping + head * m * C, f.total = at.total + head * m * (C + 1);
    f.whole = at.whole + head * m, f.weights = at.drawn_weights + head * m;
    f.dropped = at.drawn_dropped + head * m * C;
    curves[size_t(head)] = std::make_unique<Curves>(*w.rules, w.steps, f);
  }
  void decide_all() { decide(curves, s, w.amount, w.quantized(), at.step, w.measured); }
  // Lists of the blocks that a head's step keeps, in place of their first steps.
  void take(int64_t head) const {
    const int64_t n_q = s.n_q(), n_k = s.n_k();
    for (int64_t row = head * n_q; row < (head + 1) * n_q; ++row) {
      int32_t *list = w.indices + row * n_k, kept = 0;
      for (int64_t j = 0; j < n_k; ++j)
        if (list[j] >= 0 && list[j] <= at.step[head]) list[kept++] = int32_t(j);
      std::fill(list + kept, list + n_k, -1);
      w.counts[row] = kept;
    }
  }

 private:
  const Kernels& k;
  const Work& w;
  const Shape& s;
  RowCounts counts;
  std::vector<CheckedBlock> blocks;
  std::vector<std::unique_ptr<Curves>> curves;
  int64_t heads, n, m;                // surveyed and measured rows of a head
  int64_t survey_rows, measure_rows;  // of a task
  int32_t slots[kMaxSteps + 2];
  Places at;
  SurveyArgs survey_args{};
  BudgetArgs measure_args{};

  double* weights_of(int kind, int64_t head) const {
    return at.survey_weights + (kind * heads + head) * n;
  }
  double* fact(int which, int kind, int64_t head) const {
    return at.survey + ((which * 2 + kind) * heads + head) * w.steps.n_steps;
  }
  // Rows task · most … of those of a head that are used.
  RowTask rows_of(const int64_t* rows, int64_t length, int64_t head, int64_t task,
                  int64_t most) const {
    RowTask found{};
    found.b = head / s.Hq, found.h = head % s.Hq;
    for (int64_t i = 0, used = 0; i < length && found.n < most; ++i) {
      if (rows[i] < 0 || used++ < task * most) continue;
      found.row[found.n] = rows[i];
      found.place[found.n++] = head * length + i;
    }
    return found;
  }
};

}  // namespace
}  // namespace sparge
