// torch.ops.sparge_cpu.attention: a whole call in one parallel region.
#include <torch/csrc/stable/library.h>

#include "tasks.h"
#include "whole_call.h"

namespace sparge {
namespace {

// Whether attention ran: false where the plan keeps so much that the caller would rather run dense.
// `seconds`, if given: worker time of prepare, predict, select and attend.
bool attention(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor mask,
               bool is_causal, int64_t offset, double softmax_scale, int64_t precision,
               int64_t keep, const Tensor& amount, int64_t predictor, int64_t sample_rows,
               MaybeTensor min_similarity, const Tensor& forced, MaybeTensor pv_skip,
               int64_t pool_group, double most_kept, double pooled_cost, Tensor counts,
               Tensor indices, Tensor allowed, Tensor out, Tensor lse, Tensor pv_skips,
               MaybeTensor seconds, int64_t threads, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  Asked a{};
  a.shape = arguments.shape(query, key, &value);
  const Shape& s = a.shape;
  a.query = arguments.float_rows("query", query, {s.B, s.Hq, s.Lq, s.D});
  a.key = arguments.float_rows("key", key, {s.B, s.Hk, s.Lk, s.D});
  a.value = arguments.float_rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  if (a.query.dtype != a.key.dtype || a.value.dtype != a.key.dtype)
    refuse("query, key and value must have one dtype");
  a.tokens = Arguments::diagonal(is_causal, offset);
  if (mask) {
    arguments.take_mask(&a.tokens, *mask, s);
    a.mask_b = mask->size(0), a.mask_h = mask->size(1);
  }
  a.softmax_scale = Arguments::finite("softmax_scale", softmax_scale);
  a.precision = Precision(in_range("precision", precision, 0, int64_t(Precision::exact)));
  a.keep = Keep(in_range("keep", keep, 0, int64_t(Keep::fraction)));
  a.amount = arguments.read<double>("amount", amount, {s.Hq});
  check_between("amount", a.amount, s.Hq, 0.0, 1.0);
  a.predictor = Predictor(in_range("predictor", predictor, 0, int64_t(Predictor::blend)));
  a.sample_rows = int(in_range("sample_rows", sample_rows, 1, kBlockQ));
  a.min_similarity = arguments.read<float>("min_similarity", min_similarity, {s.Hq});
  a.forced = arguments.read<bool>("forced", forced, {s.n_q(), s.n_k()});
  a.pv_skip = arguments.read<float>("pv_skip", pv_skip, {s.Hq});
  a.pool_group = int(in_range("pool_group", pool_group, 0, kBlockK));
  if (pool_group && kBlockK % pool_group)
    refuse("pool_group must divide ", kBlockK, " or be 0, got ", pool_group);
  a.most_kept = Arguments::finite("most_kept", most_kept);
  a.pooled_cost = Arguments::finite("pooled_cost", pooled_cost);
  a.counts = arguments.write<int32_t>("counts", counts, {s.B, s.Hq, s.n_q()});
  a.indices = arguments.write<int32_t>("indices", indices, {s.B, s.Hq, s.n_q(), s.n_k()});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {s.B, s.Hq, s.n_q()});
  a.out = arguments.write_floats("out", out, {s.B, s.Hq, s.Lq, s.Dv}, &a.out_dtype);
  a.lse = arguments.write<float>("lse", lse, {s.B, s.Hq, s.Lq});
  a.pv_skips = arguments.write<int32_t>("pv_skips", pv_skips, {s.B, s.Hq, s.n_q()});
  double* told = arguments.write<double>("seconds", seconds, {kStages});
  in_range("threads", threads, 0, kMaxLength);

  WholeCall call(k, a, told != nullptr);
  Driver driver(&call);
  const int64_t most = torch::stable::get_num_threads();
  driver.run(threads && threads < most ? threads : most, [](int64_t n, const auto& work) {
    if (n <= 1) return work();
    torch::stable::parallel_for(0, n, 1, [&](int64_t, int64_t) { work(); });
  });
  for (int i = 0; told && i < kStages; ++i) told[i] = double(call.nanoseconds[i]) * 1e-9;
  return !driver.was_stopped();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, int offset, "
      "float softmax_scale, int precision, int keep, Tensor amount, int predictor, "
      "int sample_rows, Tensor? min_similarity, Tensor forced, Tensor? pv_skip, int pool_group, "
      "float most_kept, float pooled_cost, Tensor(a!) counts, Tensor(b!) indices, "
      "Tensor(c!) allowed, Tensor(d!) out, Tensor(e!) lse, Tensor(f!) pv_skips, "
      "Tensor(g!)? seconds, int threads, int isa) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) { m.impl("attention", TORCH_BOX(&attention)); }

}  // namespace sparge
