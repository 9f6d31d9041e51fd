// torch.ops.sparge_cpu.{deviations, survey, step_errors}: what an error budget looks at.
//
//   deviations   distance of every query from the mean of its block: which rows to look at
//   survey       the mass that each step drops from some rows, and its statistics
//   step_errors  the error of some steps on some rows, as computed against exact
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

void deviations(const Tensor& query, Tensor deviation, Tensor energy, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  DeviationArgs a{};
  a.query = arguments.float_rows("query", query, {kAny, kAny, kAny, kAny});
  const int64_t B = query.size(0);
  a.H = query.size(1), a.L = query.size(2), a.D = query.size(3);
  const int64_t n_q = blocks_of(a.L, kBlockQ);
  a.deviation = arguments.write<float>("deviation", deviation, {B, a.H, a.L});
  a.energy = arguments.write<float>("energy", energy, {B, a.H, n_q});
  run_tasks(k, B * a.H * n_q, 64, nullptr, [&](int64_t task, char*) { k.deviations(a, task); });
}

// Rows [B, Hq, n] as tasks of one head each; rows of -1 are left out. Groups of one task share the
// packing of K and V, as long as every thread has a task.
std::vector<RowTask> tasks_of(const int64_t* rows, int64_t n, const Shape& s) {
  std::vector<int64_t> held(size_t(s.B * s.Hq));
  int64_t groups = 0;
  for (int64_t head = 0; head < s.B * s.Hq; ++head) {
    for (int64_t i = head * n; i < (head + 1) * n; ++i) {
      in_range("rows", rows[i], -1, s.Lq - 1);
      held[size_t(head)] += rows[i] >= 0;
    }
    groups += blocks_of(held[size_t(head)], kLanes);
  }
  const int64_t threads = std::max<int64_t>(torch::stable::get_num_threads(), 1);
  const int64_t most = std::clamp<int64_t>(groups / (2 * threads), 1, kMaxCheckGroups) * kLanes;
  std::vector<RowTask> tasks;
  for (int64_t head = 0; head < s.B * s.Hq; ++head) {
    RowTask task{};
    task.b = head / s.Hq, task.h = head % s.Hq;
    for (int64_t i = head * n; i < (head + 1) * n; ++i) {
      if (rows[i] < 0) continue;
      task.row[task.n] = rows[i];
      task.place[task.n++] = i;
      if (task.n < most) continue;
      tasks.push_back(task);
      task.n = 0;
    }
    if (task.n) tasks.push_back(task);
  }
  return tasks;
}

// The mean of each step, its standard error, and the largest weight x mass, in the order of rows.
void summarize(const float* dropped, const int64_t* rows, const double* weights, int64_t n,
               int n_steps, double* mean, double* deviation, double* heaviest) {
  std::fill(mean, mean + n_steps, 0.0);
  std::fill(deviation, deviation + n_steps, 0.0);
  std::fill(heaviest, heaviest + n_steps, 0.0);
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] < 0 || weights[i] == 0.0) continue;
    for (int step = 0; step < n_steps; ++step) {
      const double x = weights[i] * double(dropped[i * n_steps + step]);
      mean[step] += x;
      heaviest[step] = x <= heaviest[step] ? heaviest[step] : x;  // NaN is the largest of all
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

void survey(const Tensor& query, const Tensor& key, MaybeTensor q_scale, int64_t q_rows_per_scale,
            MaybeTensor k_scale, int64_t k_rows_per_scale, int64_t precision, double softmax_scale,
            const Tensor& first_steps, const Tensor& rows, const Tensor& weights, MaybeTensor mask,
            MaybeTensor kinds, bool is_causal, int64_t offset, Tensor dropped, Tensor mean,
            Tensor deviation, Tensor heaviest, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  SurveyArgs a{};
  a.shape = arguments.shape(query, key);
  const Shape& s = a.shape;
  arguments.scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
                   softmax_scale);
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, s);
  const int64_t* row = arguments.read<int64_t>("rows", rows, {s.B, s.Hq, kAny});
  const int64_t n = rows.size(2);
  const double* weight = arguments.read<double>("weights", weights, {2, s.B, s.Hq, n});
  a.dropped = arguments.write<float>("dropped", dropped, {s.B, s.Hq, n, kAny});
  a.n_steps = int(in_range("the number of steps of dropped", dropped.size(3), 1, kMaxSteps));
  double* to_mean = arguments.write<double>("mean", mean, {2, s.B, s.Hq, a.n_steps});
  double* to_dev = arguments.write<double>("deviation", deviation, {2, s.B, s.Hq, a.n_steps});
  double* to_most = arguments.write<double>("heaviest", heaviest, {2, s.B, s.Hq, a.n_steps});
  a.first_steps = read_steps(k, &arguments, first_steps, s, a.n_steps);
  const std::vector<RowTask> tasks = tasks_of(row, n, s);
  std::fill(a.dropped, a.dropped + s.B * s.Hq * n * a.n_steps, 0.0f);
  if (!tasks.empty()) {
    a.tasks = tasks.data();
    run_tasks(k, int64_t(tasks.size()), k.survey_scratch(a), nullptr,
              [&](int64_t task, char* scratch) { k.survey(a, task, scratch); });
  }
  const int64_t heads = s.B * s.Hq;
  run_tasks(k, heads, 64, nullptr, [&](int64_t head, char*) {
    const double *base = weight + head * n, *every = weight + (heads + head) * n;
    const bool same = std::equal(base, base + n, every);
    for (int64_t task = head; task < 2 * heads; task += heads) {
      const int64_t at = task * a.n_steps;
      if (same && task >= heads)
        for (double* x : {to_mean, to_dev, to_most})
          std::copy_n(x + head * a.n_steps, a.n_steps, x + at);
      else
        summarize(a.dropped + head * n * a.n_steps, row + head * n, weight + task * n, n, a.n_steps,
                  to_mean + at, to_dev + at, to_most + at);
    }
  });
}

void step_errors(const Tensor& query, const Tensor& key, MaybeTensor q_scale,
                 int64_t q_rows_per_scale, MaybeTensor k_scale, int64_t k_rows_per_scale,
                 int64_t precision, double softmax_scale, MaybeTensor exact_query,
                 MaybeTensor exact_key, const Tensor& value, MaybeTensor codes, MaybeTensor v_scale,
                 MaybeTensor pooled_key, MaybeTensor pooled_k_scale, MaybeTensor pooled_value,
                 int64_t pool_group, const Tensor& first_steps, int64_t n_steps,
                 const Tensor& steps, const Tensor& rows, MaybeTensor mask, MaybeTensor kinds,
                 bool is_causal, int64_t offset, Tensor skipping, Tensor total, Tensor whole,
                 int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  BudgetArgs a{};
  a.shape = arguments.shape(query, key, &value);
  const Shape& s = a.shape;
  arguments.scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
                   softmax_scale);
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, s);
  if (exact_query.has_value() != exact_key.has_value())
    refuse("exact_query and exact_key must come together");
  if (exact_query) {
    a.exact = a;
    a.exact.q_scale = a.exact.k_scale = Scales{};
    a.exact.query = arguments.float_rows("exact_query", *exact_query, {s.B, s.Hq, s.Lq, s.D});
    a.exact.key = arguments.float_rows("exact_key", *exact_key, {s.B, s.Hk, s.Lk, s.D});
    if (a.exact.query.dtype != a.exact.key.dtype)
      refuse("exact_key must have the dtype of exact_query");
    // 16-bit numbers are multiplied as they are; fp32 must not be rounded to them.
    a.exact.precision = a.exact.query.dtype == Dtype::bf16 ? Precision::half : Precision::exact;
  }
  a.value = arguments.float_rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  if (codes.has_value() != v_scale.has_value()) refuse("codes and v_scale must come together");
  if (codes) {
    a.codes = arguments.rows("codes", *codes, {s.B, s.Hk, s.Lk, s.Dv});
    if (a.codes.dtype != Dtype::i8) refuse("codes must be int8");
    a.v_scale = arguments.read<float>("v_scale", *v_scale, {s.B, s.Hk, s.n_k(), s.Dv});
  }
  if (pooled_key.has_value() != pooled_value.has_value())
    refuse("pooled_key and pooled_value must come together");
  if (pooled_key) {
    a.pool_group = int(in_range("pool_group", pool_group, 1, kBlockK));
    if (kBlockK % pool_group) refuse("pool_group must divide ", kBlockK, ", got ", pool_group);
    a.pooled = a;
    a.pooled.tokens = TokenMask{};
    a.pooled.shape.Lk = blocks_of(s.Lk, pool_group);
    const int64_t entries = a.pooled.shape.Lk;
    a.pooled.key = arguments.rows("pooled_key", *pooled_key, {s.B, s.Hk, entries, s.D});
    const bool coded = a.key.dtype == Dtype::i8;
    if ((a.pooled.key.dtype == Dtype::i8) != coded)
      refuse("pooled_key must be", coded ? "" : " no", " int8 codes, as key is");
    a.pooled.k_scale =
        arguments.scales("pooled_k_scale", pooled_k_scale, coded, "", 1, {s.B, s.Hk, entries});
    a.pooled_value =
        arguments.float_rows("pooled_value", *pooled_value, {s.B, s.Hk, entries, s.Dv});
  } else if (pooled_k_scale) {
    refuse("pooled_key is needed with pooled_k_scale");
  }
  const int64_t* row = arguments.read<int64_t>("rows", rows, {s.B, s.Hq, kAny});
  const int64_t n = rows.size(2);
  a.n_steps = int(in_range("n_steps", n_steps, 1, kMaxSteps));
  const int32_t* measured = arguments.read<int32_t>("steps", steps, {kAny});
  a.n_slots = int(in_range("the number of steps", steps.size(0), 1, kMaxSteps));
  // Slot 0 in front, for first step -1: pooled entries of such a block are never read.
  int32_t with_none[kMaxSteps + 2] = {}, *slots = with_none + 1;
  for (int i = 0; i < a.n_slots; ++i) {
    in_range("steps", measured[i], i ? measured[i - 1] + 1 : 0, a.n_steps - 1);
    for (int step = measured[i] + 1; step <= a.n_steps; ++step) slots[step] = i + 1;
  }
  a.slots = slots;
  a.skipping = arguments.write<double>("skipping", skipping, {s.B, s.Hq, n, a.n_slots});
  a.total = arguments.write<double>("total", total, {s.B, s.Hq, n, a.n_slots + 1});
  a.whole = arguments.write<double>("whole", whole, {s.B, s.Hq, n});
  a.first_steps = read_steps(k, &arguments, first_steps, s, a.n_steps);
  const std::vector<RowTask> tasks = tasks_of(row, n, s);
  const int64_t places = s.B * s.Hq * n;
  std::fill(a.skipping, a.skipping + places * a.n_slots, 0.0);
  std::fill(a.total, a.total + places * (a.n_slots + 1), 0.0);
  std::fill(a.whole, a.whole + places, 0.0);
  if (tasks.empty()) return;
  a.tasks = tasks.data();
  run_tasks(k, int64_t(tasks.size()), k.budget_scratch(a), nullptr,
            [&](int64_t task, char* scratch) { k.budget(a, task, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def("deviations(Tensor query, Tensor(a!) deviation, Tensor(b!) energy, int isa) -> ()");
  m.def(
      "survey(Tensor query, Tensor key, Tensor? q_scale, int q_rows_per_scale, Tensor? k_scale, "
      "int k_rows_per_scale, int precision, float softmax_scale, Tensor first_steps, Tensor rows, "
      "Tensor weights, Tensor? mask, Tensor? kinds, bool is_causal, int offset, "
      "Tensor(a!) dropped, Tensor(b!) mean, Tensor(c!) deviation, Tensor(d!) heaviest, "
      "int isa) -> ()");
  m.def(
      "step_errors(Tensor query, Tensor key, Tensor? q_scale, int q_rows_per_scale, "
      "Tensor? k_scale, int k_rows_per_scale, int precision, float softmax_scale, "
      "Tensor? exact_query, Tensor? exact_key, Tensor value, Tensor? codes, Tensor? v_scale, "
      "Tensor? pooled_key, Tensor? pooled_k_scale, Tensor? pooled_value, int pool_group, "
      "Tensor first_steps, int n_steps, Tensor steps, Tensor rows, Tensor? mask, Tensor? kinds, "
      "bool is_causal, int offset, Tensor(a!) skipping, Tensor(b!) total, Tensor(c!) whole, "
      "int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("deviations", TORCH_BOX(&deviations));
  m.impl("survey", TORCH_BOX(&survey));
  m.impl("step_errors", TORCH_BOX(&step_errors));
}

}  // namespace sparge
