// torch.ops.sparge_cpu.{attention, attention_varlen}: whole calls in one parallel region.
#include <torch/csrc/stable/library.h>

#include <numeric>

#include "pack.h"
#include "tasks.h"
#include "whole_call.h"

namespace sparge {
namespace {

// The tensors and the flags of both ops; shapes and outputs are left.
Asked read_inputs(Arguments* arguments, const Tensor& query, const Tensor& key, const Tensor& value,
                  double softmax_scale) {
  Asked a{};
  a.shape = arguments->shape(query, key, &value);
  const Shape& s = a.shape;
  a.query = arguments->float_rows("query", query, {s.B, s.Hq, s.Lq, s.D});
  a.key = arguments->float_rows("key", key, {s.B, s.Hk, s.Lk, s.D});
  a.value = arguments->float_rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  if (a.query.dtype != a.key.dtype || a.value.dtype != a.key.dtype)
    refuse("query, key and value must have one dtype");
  a.softmax_scale = Arguments::finite("softmax_scale", softmax_scale);
  return a;
}

// The numbers of a recipe, as backends/cpu/whole_call.py makes them.
void read_recipe(Arguments* arguments, Asked* a, int64_t precision, int64_t keep,
                 const Tensor& amount, int64_t predictor, int64_t sample_rows,
                 const MaybeTensor& min_similarity, int64_t sink_blocks, int64_t window,
                 const MaybeTensor& protect, const MaybeTensor& pv_skip, int64_t pool_group) {
  const int64_t Hq = a->shape.Hq;
  a->precision = Precision(in_range("precision", precision, 0, int64_t(Precision::exact)));
  a->keep = Keep(in_range("keep", keep, 0, int64_t(Keep::fraction)));
  a->amount = arguments->read<double>("amount", amount, {Hq});
  check_between("amount", a->amount, Hq, 0.0, 1.0);
  a->predictor = Predictor(in_range("predictor", predictor, 0, int64_t(Predictor::blend)));
  a->sample_rows = int(in_range("sample_rows", sample_rows, 1, kBlockQ));
  a->min_similarity = arguments->read<float>("min_similarity", min_similarity, {Hq});
  a->forced = {in_range("sink_blocks", sink_blocks, 0, kMaxLength),
               in_range("window", window, 0, kMaxLength), nullptr, 0};
  if (protect) {
    a->forced.protect = arguments->read<int64_t>("protect", *protect, {kAny, 2});
    a->forced.n_protected = protect->size(0);
    for (int64_t i = 0; i < 2 * a->forced.n_protected; ++i)
      in_range("protect", a->forced.protect[i], -kMaxOffset, kMaxOffset);
  }
  a->pv_skip = arguments->read<float>("pv_skip", pv_skip, {Hq});
  a->pool_group = int(in_range("pool_group", pool_group, 0, kBlockK));
  if (pool_group && kBlockK % pool_group)
    refuse("pool_group must divide ", kBlockK, " or be 0, got ", pool_group);
}

void run_job(Job* job, int64_t threads) {
  const int64_t most = torch::stable::get_num_threads();
  Driver(job).run(threads && threads < most ? threads : most, [](int64_t n, const auto& work) {
    if (n <= 1) return work();
    torch::stable::parallel_for(0, n, 1, [&](int64_t, int64_t) { work(); });
  });
}

void add_seconds(const WholeCall& call, double* seconds) {
  for (int i = 0; seconds && i < kStages; ++i) seconds[i] += double(call.nanoseconds[i]) * 1e-9;
}

// Whether attention ran: false where the plan keeps so much that the caller would rather run dense.
// `seconds`, if given: worker time of prepare, predict, select and attend is added to it.
bool attention(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor mask,
               bool is_causal, int64_t offset, double softmax_scale, int64_t precision,
               int64_t keep, const Tensor& amount, int64_t predictor, int64_t sample_rows,
               MaybeTensor min_similarity, int64_t sink_blocks, int64_t window, MaybeTensor protect,
               MaybeTensor pv_skip, int64_t pool_group, double most_kept, double pooled_cost,
               Tensor counts, Tensor indices, Tensor allowed, Tensor out, Tensor lse,
               Tensor pv_skips, MaybeTensor seconds, int64_t threads, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  Asked a = read_inputs(&arguments, query, key, value, softmax_scale);
  const Shape& s = a.shape;
  a.tokens = Arguments::diagonal(is_causal, offset);
  if (mask) {
    arguments.take_mask(&a.tokens, *mask, s);
    a.mask_b = mask->size(0), a.mask_h = mask->size(1);
  }
  read_recipe(&arguments, &a, precision, keep, amount, predictor, sample_rows, min_similarity,
              sink_blocks, window, protect, pv_skip, pool_group);
  a.most_kept = Arguments::finite("most_kept", most_kept);
  a.pooled_cost = Arguments::finite("pooled_cost", pooled_cost);
  a.counts = arguments.write<int32_t>("counts", counts, {s.B, s.Hq, s.n_q()});
  a.indices = arguments.write<int32_t>("indices", indices, {s.B, s.Hq, s.n_q(), s.n_k()});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {s.B, s.Hq, s.n_q()});
  a.out = arguments.write_floats("out", out, {s.B, s.Hq, s.Lq, s.Dv}, &a.out_dtype);
  a.out_stride_l = s.Dv * int64_t(out.element_size()), a.out_stride_h = s.Lq * a.out_stride_l;
  a.lse = arguments.write<float>("lse", lse, {s.B, s.Hq, s.Lq});
  a.lse_stride_h = s.Lq;
  a.pv_skips = arguments.write<int32_t>("pv_skips", pv_skips, {s.B, s.Hq, s.n_q()});
  double* told = arguments.write<double>("seconds", seconds, {kStages});
  in_range("threads", threads, 0, kMaxLength);

  WholeCall call(k, a, told != nullptr);
  run_job(&call, threads);
  add_seconds(call, told);
  return call.attended;
}

// Packed sequences. `q_rows` and `k_rows` [n, 2] have the first row and the number of rows of each,
// `offsets` [n] the key position of its first query. Lists have the shapes [query blocks, Hq] and
// [pairs of blocks, Hq], in the order of the sequences. The output is packed as the inputs are, out
// [T, Hq, Dv] and lse [Hq, T]; rows of other sequences are not written. `most_kept` [n], if given,
// is of each sequence, and `attended` [n] receives whether it was attended.
void attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& q_rows, const Tensor& k_rows, const Tensor& offsets,
                      bool is_causal, double softmax_scale, int64_t precision, int64_t keep,
                      const Tensor& amount, int64_t predictor, int64_t sample_rows,
                      MaybeTensor min_similarity, int64_t sink_blocks, int64_t window,
                      MaybeTensor protect, MaybeTensor pv_skip, int64_t pool_group,
                      MaybeTensor most_kept, double pooled_cost, Tensor counts, Tensor indices,
                      Tensor allowed, Tensor out, Tensor lse, Tensor pv_skips, Tensor attended,
                      MaybeTensor seconds, int64_t threads, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  Asked a = read_inputs(&arguments, query, key, value, softmax_scale);
  const Shape whole = a.shape;
  if (whole.B != 1) refuse("query must have a batch of 1, got ", whole.B);
  const Pack pack(&arguments, q_rows, k_rows, offsets, is_causal);
  pack.q.check_within("query", whole.Lq);
  pack.q.check_apart();
  pack.k.check_within("key", whole.Lk);
  read_recipe(&arguments, &a, precision, keep, amount, predictor, sample_rows, min_similarity,
              sink_blocks, window, protect, pv_skip, pool_group);
  const int64_t n = pack.n(), Hq = whole.Hq, n_q = pack.q_blocks.back();
  const double* most = arguments.read<double>("most_kept", most_kept, {n});
  for (int64_t i = 0; most && i < n; ++i) Arguments::finite("most_kept", most[i]);
  a.pooled_cost = Arguments::finite("pooled_cost", pooled_cost);
  a.counts = arguments.write<int32_t>("counts", counts, {n_q, Hq});
  a.indices = arguments.write<int32_t>("indices", indices, {pack.pairs.back(), Hq});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {n_q, Hq});
  a.out = arguments.write_floats("out", out, {whole.Lq, Hq, whole.Dv}, &a.out_dtype);
  a.out_stride_h = whole.Dv * int64_t(out.element_size()), a.out_stride_l = Hq * a.out_stride_h;
  a.lse = arguments.write<float>("lse", lse, {Hq, whole.Lq});
  a.lse_stride_h = whole.Lq;
  a.pv_skips = arguments.write<int32_t>("pv_skips", pv_skips, {n_q, Hq});
  bool* ran = arguments.write<bool>("attended", attended, {n});
  double* told = arguments.write<double>("seconds", seconds, {kStages});
  in_range("threads", threads, 0, kMaxLength);

  // Those with the most to do first: what is left at the end is short.
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  auto work = [&](int64_t i) { return pack.q.length(i) * pack.k.length(i); };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return work(x) > work(y); });
  std::vector<std::unique_ptr<WholeCall>> calls;
  for (const int64_t i : order) {
    Asked own = a;
    own.shape = pack.shape(i, Hq, whole.Hk, whole.D, whole.Dv);
    own.tokens = pack.tokens(i);
    own.query.data += pack.q.start(i) * a.query.stride_l;
    own.key.data += pack.k.start(i) * a.key.stride_l;
    own.value.data += pack.k.start(i) * a.value.stride_l;
    own.most_kept = most ? most[i] : -1.0;
    own.counts = part_of(a.counts, pack.q_blocks, i, Hq);
    own.indices = part_of(a.indices, pack.pairs, i, Hq);
    own.allowed = part_of(a.allowed, pack.q_blocks, i, Hq);
    own.pv_skips = part_of(a.pv_skips, pack.q_blocks, i, Hq);
    own.out += pack.q.start(i) * a.out_stride_l;
    own.lse += pack.q.start(i);
    calls.push_back(std::make_unique<WholeCall>(k, own, told != nullptr));
  }
  WholeCalls job(std::move(calls));
  run_job(&job, threads);
  for (size_t i = 0; i < order.size(); ++i) {
    ran[order[i]] = job.calls[i]->attended;
    add_seconds(*job.calls[i], told);
  }
}

}  // namespace

#define SPARGE_RECIPE                                                                       \
  "float softmax_scale, int precision, int keep, Tensor amount, int predictor, "            \
  "int sample_rows, Tensor? min_similarity, int sink_blocks, int window, Tensor? protect, " \
  "Tensor? pv_skip, int pool_group, "
#define SPARGE_OUTPUTS                                                          \
  "Tensor(a!) counts, Tensor(b!) indices, Tensor(c!) allowed, Tensor(d!) out, " \
  "Tensor(e!) lse, Tensor(f!) pv_skips, "

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
      "int offset, " SPARGE_RECIPE "float most_kept, float pooled_cost, " SPARGE_OUTPUTS
      "Tensor(g!)? seconds, int threads, int isa) -> bool");
  m.def(
      "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor q_rows, Tensor k_rows, "
      "Tensor offsets, bool is_causal, " SPARGE_RECIPE
      "Tensor? most_kept, float pooled_cost, " SPARGE_OUTPUTS
      "Tensor(g!) attended, Tensor(h!)? seconds, int threads, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_varlen", TORCH_BOX(&attention_varlen));
}

}  // namespace sparge
