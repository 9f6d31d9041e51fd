// torch.ops.sparge_cpu.{predict, select, first_steps, take_steps}: from statistics to a plan.
//
//   predict      the mass map [B, Hq, n_q, n_k]; a caller on several machines reduces it here
//   select       the kept blocks of every query block
//   first_steps  for an error budget: the first step that keeps each block; ops_budget.cpp measures
//   take_steps   the kept blocks of the step that each head takes
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

// f(task, scratch) for tasks that are pieces of heads. The last rows of a causal head may attend
// the most blocks: they go first.
template <class F>
void run_pieces(const Kernels& k, int64_t heads, int64_t per_head, size_t scratch, const F& f) {
  std::vector<int64_t> order(static_cast<size_t>(heads * per_head));
  for (int64_t i = 0; i < heads * per_head; ++i)
    order[size_t(i)] = i % heads * per_head + (per_head - 1 - i / heads);
  run_tasks(k, heads * per_head, scratch, order.data(), f);
}

void predict(const Tensor& query, const Tensor& key, MaybeTensor q_scale, int64_t q_rows_per_scale,
             MaybeTensor k_scale, int64_t k_rows_per_scale, int64_t precision, double softmax_scale,
             MaybeTensor q_pooled, MaybeTensor k_pooled, MaybeTensor k_similarity,
             MaybeTensor min_similarity, MaybeTensor mask, MaybeTensor kinds, bool is_causal,
             int64_t offset, int64_t predictor, int64_t sample_rows, Tensor mass, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  PredictArgs a{};
  a.predictor = Predictor(in_range("predictor", predictor, 0, int64_t(Predictor::blend)));
  a.shape = arguments.shape(query, key);
  const Shape& s = a.shape;
  arguments.scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
                   softmax_scale, a.predictor != Predictor::mean);
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, s);
  a.sample_rows = int(in_range("sample_rows", sample_rows, 1, kBlockQ));
  a.q_pooled = arguments.read<float>("q_pooled", q_pooled, {s.B, s.Hq, s.n_q(), s.D});
  a.k_pooled = arguments.read<float>("k_pooled", k_pooled, {s.B, s.Hk, s.n_k(), s.D});
  if (a.predictor != Predictor::rows && !(a.q_pooled && a.k_pooled))
    refuse("q_pooled and k_pooled are needed by predictor ", predictor);
  a.similarity.minimum = arguments.read<float>("min_similarity", min_similarity, {s.Hq});
  a.similarity.key = arguments.read<float>("k_similarity", k_similarity, {s.B, s.Hk, s.n_k()});
  if (a.similarity.minimum && !a.similarity.key)
    refuse("k_similarity is needed with min_similarity");
  a.mass = arguments.write<float>("mass", mass, {s.B, s.Hq, s.n_q(), s.n_k()});
  run_pieces(k, s.B * s.Hq, blocks_of(s.n_q(), k.query_blocks_per_task), k.predict_scratch(a),
             [&](int64_t task, char* scratch) { k.predict(a, task, scratch); });
}

void run_select(const Kernels& k, const SelectArgs& a) {
  const int64_t per_head = blocks_of(a.shape.n_q(), k.query_blocks_per_task);
  run_pieces(k, a.shape.B * a.shape.Hq, per_head, k.select_scratch(a),
             [&](int64_t task, char* scratch) { k.select(a, task, scratch); });
}

void select(MaybeTensor mass, int64_t keep, const Tensor& amount, MaybeTensor q_similarity,
            MaybeTensor k_similarity, MaybeTensor min_similarity, const Tensor& forced,
            MaybeTensor mask, MaybeTensor kinds, bool is_causal, int64_t offset, int64_t Lq,
            int64_t Lk, Tensor counts, Tensor indices, Tensor allowed, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  SelectArgs a{};
  const int64_t n_q = blocks_of(in_range("Lq", Lq, 1, kMaxLength), kBlockQ);
  const int64_t n_k = blocks_of(in_range("Lk", Lk, 1, kMaxLength), kBlockK);
  a.indices = arguments.write<int32_t>("indices", indices, {kAny, kAny, n_q, n_k});
  const int64_t B = indices.size(0), Hq = indices.size(1);
  a.similarity.key = arguments.read<float>("k_similarity", k_similarity, {B, kAny, n_k});
  const int64_t Hk = k_similarity ? k_similarity->size(1) : Hq;
  if (Hq % Hk) refuse("k_similarity must have a number of heads that divides ", Hq, ", got ", Hk);
  a.shape = {B, Hq, Hk, Lq, Lk, 1, 1};
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, a.shape);
  a.keep = Keep(in_range("keep", keep, 0, int64_t(Keep::fraction)));
  a.mass = arguments.read<float>("mass", mass, {B, Hq, n_q, n_k});
  if (a.keep != Keep::all && !a.mass) refuse("mass is needed by keep ", keep);
  a.amount = arguments.read<double>("amount", amount, {Hq});
  check_between("amount", a.amount, Hq, 0.0, 1.0);
  a.similarity.query = arguments.read<float>("q_similarity", q_similarity, {B, Hq, n_q});
  a.similarity.minimum = arguments.read<float>("min_similarity", min_similarity, {Hq});
  if (a.similarity.minimum && !(a.similarity.query && a.similarity.key))
    refuse("q_similarity and k_similarity are needed with min_similarity");
  a.forced = arguments.read<bool>("forced", forced, {n_q, n_k});
  a.counts = arguments.write<int32_t>("counts", counts, {B, Hq, n_q});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {B, Hq, n_q});
  run_select(k, a);
}

// For an error budget: the first step that keeps each block, in place of the lists.
void first_steps(const Tensor& mass, const Tensor& masses, const Tensor& forced, MaybeTensor mask,
                 MaybeTensor kinds, bool is_causal, int64_t offset, int64_t Lq, int64_t Lk,
                 Tensor indices, Tensor allowed, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  SelectArgs a{};
  const int64_t n_q = blocks_of(in_range("Lq", Lq, 1, kMaxLength), kBlockQ);
  const int64_t n_k = blocks_of(in_range("Lk", Lk, 1, kMaxLength), kBlockK);
  a.indices = arguments.write<int32_t>("indices", indices, {kAny, kAny, n_q, n_k});
  const int64_t B = indices.size(0), Hq = indices.size(1);
  a.shape = {B, Hq, Hq, Lq, Lk, 1, 1};
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, a.shape);
  a.keep = Keep::error;
  a.mass = arguments.read<float>("mass", mass, {B, Hq, n_q, n_k});
  a.masses = arguments.read<double>("masses", masses, {kAny});
  a.n_steps = int(in_range("the number of masses", masses.size(0), 1, kMaxSteps));
  check_between("masses", a.masses, a.n_steps, 0.0, 1.0);
  if (!std::is_sorted(a.masses, a.masses + a.n_steps)) refuse("masses must not fall");
  a.forced = arguments.read<bool>("forced", forced, {n_q, n_k});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {B, Hq, n_q});
  run_select(k, a);
}

// Lists of the blocks that each head's step keeps, in place of their first steps.
void take_steps(const Tensor& step, Tensor counts, Tensor indices, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  int32_t* all = arguments.write<int32_t>("indices", indices, {kAny, kAny, kAny, kAny});
  const int64_t B = indices.size(0), Hq = indices.size(1), n_q = indices.size(2);
  const int64_t n_k = indices.size(3);
  const int64_t* taken = arguments.read<int64_t>("step", step, {B, Hq});
  int32_t* count = arguments.write<int32_t>("counts", counts, {B, Hq, n_q});
  run_tasks(k, B * Hq, 64, nullptr, [&](int64_t head, char*) {
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
      "predict(Tensor query, Tensor key, Tensor? q_scale, int q_rows_per_scale, Tensor? k_scale, "
      "int k_rows_per_scale, int precision, float softmax_scale, Tensor? q_pooled, "
      "Tensor? k_pooled, Tensor? k_similarity, Tensor? min_similarity, Tensor? mask, "
      "Tensor? kinds, bool is_causal, int offset, int predictor, int sample_rows, "
      "Tensor(a!) mass, int isa) -> ()");
  m.def(
      "select(Tensor? mass, int keep, Tensor amount, Tensor? q_similarity, Tensor? k_similarity, "
      "Tensor? min_similarity, Tensor forced, Tensor? mask, Tensor? kinds, bool is_causal, "
      "int offset, int Lq, int Lk, Tensor(a!) counts, Tensor(b!) indices, Tensor(c!) allowed, "
      "int isa) -> ()");
  m.def(
      "first_steps(Tensor mass, Tensor masses, Tensor forced, Tensor? mask, Tensor? kinds, "
      "bool is_causal, int offset, int Lq, int Lk, Tensor(a!) indices, Tensor(b!) allowed, "
      "int isa) -> ()");
  m.def("take_steps(Tensor step, Tensor(a!) counts, Tensor(b!) indices, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("predict", TORCH_BOX(&predict));
  m.impl("select", TORCH_BOX(&select));
  m.impl("first_steps", TORCH_BOX(&first_steps));
  m.impl("take_steps", TORCH_BOX(&take_steps));
}

}  // namespace sparge
