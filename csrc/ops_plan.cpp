// What Python calls to plan: torch.ops.sparge_cpu.{plan, plan_steps, take_steps}.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

PlanArgs plan_args(const Tensor& query, const Tensor& key, const MaybeTensor& q_scale,
                   int64_t q_rows_per_scale, const MaybeTensor& k_scale, int64_t k_rows_per_scale,
                   const MaybeTensor& q_pooled, const MaybeTensor& k_pooled, const Tensor& forced,
                   const MaybeTensor& mask, const MaybeTensor& kinds, bool is_causal,
                   int64_t offset, int64_t precision, double softmax_scale, int64_t sample_rows,
                   const Tensor& counts, const Tensor& indices, const Tensor& allowed) {
  PlanArgs a{};
  a.shape = {
      query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), 1};
  a.tokens = mask_of(mask, kinds, is_causal, offset);
  take_scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
              softmax_scale);
  a.sample_rows = int(sample_rows);
  a.q_pooled = data_of<float>(q_pooled);
  a.k_pooled = data_of<float>(k_pooled);
  a.forced = data_of<int8_t>(forced);
  a.counts = data_of<int32_t>(counts);
  a.indices = data_of<int32_t>(indices);
  a.allowed = data_of<int32_t>(allowed);
  return a;
}

// f(task, scratch) for tasks that are pieces of heads. The last rows of a causal head see the most:
// they go first.
template <class F>
void run_pieces(const Kernels& k, int64_t heads, int64_t per_head, size_t scratch, const F& f) {
  std::vector<int64_t> order(static_cast<size_t>(heads * per_head));
  for (int64_t i = 0; i < heads * per_head; ++i)
    order[size_t(i)] = i % heads * per_head + (per_head - 1 - i / heads);
  run_tasks(k, heads * per_head, scratch, order.data(), f);
}

void predict_and_keep(const Kernels& k, const PlanArgs& a) {
  const int64_t per_head = (a.shape.n_q() + k.plan_query_blocks - 1) / k.plan_query_blocks;
  run_pieces(k, a.shape.B * a.shape.Hq, per_head, k.plan_scratch(a),
             [&](int64_t task, char* scratch) { k.plan(a, task, scratch); });
}

void plan(const Tensor& query, const Tensor& key, MaybeTensor q_scale, int64_t q_rows_per_scale,
          MaybeTensor k_scale, int64_t k_rows_per_scale, MaybeTensor q_pooled, MaybeTensor k_pooled,
          MaybeTensor q_similarity, MaybeTensor k_similarity, MaybeTensor min_similarity,
          const Tensor& amount, const Tensor& forced, MaybeTensor mask, MaybeTensor kinds,
          bool is_causal, int64_t offset, int64_t predictor, int64_t keep, int64_t precision,
          double softmax_scale, int64_t sample_rows, Tensor counts, Tensor indices, Tensor allowed,
          int64_t isa) {
  PlanArgs a = plan_args(query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, q_pooled,
                         k_pooled, forced, mask, kinds, is_causal, offset, precision, softmax_scale,
                         sample_rows, counts, indices, allowed);
  a.predictor = Predictor(predictor);
  a.keep = Keep(keep);
  a.amount = data_of<double>(amount);
  a.min_similarity = data_of<float>(min_similarity);
  a.q_similarity = data_of<float>(q_similarity);
  a.k_similarity = data_of<float>(k_similarity);
  predict_and_keep(kernels_of(isa), a);
}

// The first half of a plan by error: `indices` say of every block the first step that keeps it,
// `wrong` and `whole` what each step costs the checked rows of each head. `take_steps` is the
// other.
void plan_steps(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor q_scale,
                int64_t q_rows_per_scale, MaybeTensor k_scale, int64_t k_rows_per_scale,
                const Tensor& q_pooled, const Tensor& k_pooled, const Tensor& masses,
                const Tensor& checked, const Tensor& forced, MaybeTensor mask, MaybeTensor kinds,
                bool is_causal, int64_t offset, int64_t precision, double softmax_scale,
                int64_t sample_rows, Tensor wrong, Tensor whole, Tensor indices, Tensor allowed,
                int64_t isa) {
  const Kernels& k = kernels_of(isa);
  PlanArgs a = plan_args(query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, q_pooled,
                         k_pooled, forced, mask, kinds, is_causal, offset, precision, softmax_scale,
                         sample_rows, allowed, indices, allowed);
  a.predictor = Predictor::blend;
  a.keep = Keep::error;
  a.shape.Dv = value.size(3);
  a.value = rows_of(value);
  a.masses = data_of<double>(masses);
  a.n_steps = int(masses.size(1));
  a.checked = data_of<int64_t>(checked);
  a.n_checked = checked.size(0);
  predict_and_keep(k, a);

  const int64_t heads = a.shape.B * a.shape.Hq, groups = (a.n_checked + kLanes - 1) / kLanes;
  const int64_t n_steps = a.n_steps;
  std::vector<double> off(size_t(heads * groups * n_steps)), size(size_t(heads * groups));
  a.wrong = off.data();
  a.whole = size.data();
  // Groups that walk together share the packing of K and V, if no thread goes without work by it.
  const int64_t shared = heads * groups / std::max<int64_t>(torch::stable::get_num_threads(), 1);
  a.check_groups =
      int(std::clamp<int64_t>(shared, 1, std::min<int64_t>(groups, k.most_check_groups)));
  run_pieces(k, heads, (groups + a.check_groups - 1) / a.check_groups, k.check_scratch(a),
             [&](int64_t task, char* scratch) { k.check(a, task, scratch); });
  double *sum_off = data_of<double>(wrong), *sum_size = data_of<double>(whole);
  for (int64_t head = 0; head < heads; ++head) {
    sum_size[head] = 0.0;
    std::fill(sum_off + head * n_steps, sum_off + (head + 1) * n_steps, 0.0);
    for (int64_t i = head * groups; i < (head + 1) * groups; ++i) {
      sum_size[head] += size[size_t(i)];
      for (int64_t step = 0; step < n_steps; ++step)
        sum_off[head * n_steps + step] += off[size_t(i * n_steps + step)];
    }
  }
}

// Lists of the blocks that each head's step keeps, in place of their first steps.
void take_steps(const Tensor& step, Tensor counts, Tensor indices, int64_t isa) {
  const int64_t* taken = data_of<int64_t>(step);
  int32_t *count = data_of<int32_t>(counts), *all = data_of<int32_t>(indices);
  const int64_t n_q = indices.size(2), n_k = indices.size(3);
  run_tasks(kernels_of(isa), counts.size(0) * counts.size(1), 64, nullptr,
            [&](int64_t head, char*) {
              for (int64_t row = head * n_q; row < (head + 1) * n_q; ++row) {
                int32_t *list = all + row * n_k, n = 0;
                for (int64_t j = 0; j < n_k; ++j)
                  if (list[j] >= 0 && list[j] <= taken[head]) list[n++] = int32_t(j);
                std::fill(list + n, list + n_k, -1);
                count[row] = n;
              }
            });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "plan(Tensor query, Tensor key, Tensor? q_scale, int q_rows_per_scale, Tensor? k_scale, "
      "int k_rows_per_scale, Tensor? q_pooled, Tensor? k_pooled, Tensor? q_similarity, "
      "Tensor? k_similarity, Tensor? min_similarity, Tensor amount, Tensor forced, Tensor? mask, "
      "Tensor? kinds, bool is_causal, int offset, int predictor, int keep, int precision, "
      "float softmax_scale, int sample_rows, Tensor(a!) counts, Tensor(b!) indices, "
      "Tensor(c!) allowed, int isa) -> ()");
  m.def(
      "plan_steps(Tensor query, Tensor key, Tensor value, Tensor? q_scale, int q_rows_per_scale, "
      "Tensor? k_scale, int k_rows_per_scale, Tensor q_pooled, Tensor k_pooled, Tensor masses, "
      "Tensor checked, Tensor forced, Tensor? mask, Tensor? kinds, bool is_causal, int offset, "
      "int precision, float softmax_scale, int sample_rows, Tensor(a!) wrong, Tensor(b!) whole, "
      "Tensor(c!) indices, Tensor(d!) allowed, int isa) -> ()");
  m.def("take_steps(Tensor step, Tensor(a!) counts, Tensor(b!) indices, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("plan_steps", TORCH_BOX(&plan_steps));
  m.impl("take_steps", TORCH_BOX(&take_steps));
}

}  // namespace sparge
