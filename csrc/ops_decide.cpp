// torch.ops.sparge_cpu.{choose_rows, draw_measured, decide}: the rules of an error budget, in plain
// code. Their numbers come from rules/error_budget.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "choose_rows.h"
#include "decide.h"
#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

template <class T>
void all_in_range(const char* name, const T* x, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = 0; i < n; ++i) in_range(name, int64_t(x[i]), low, high);
}

// Errors that heads may make, [H].
const double* read_budget(Arguments* arguments, const Tensor& budget, int64_t H) {
  const double* limit = arguments->read<double>("budget", budget, {H});
  for (int64_t h = 0; h < H; ++h)
    if (!(limit[h] >= 0.0 && limit[h] < INFINITY))
      refuse("budget must be finite and not negative, got ", limit[h]);
  return limit;
}

void choose_rows_op(const Tensor& deviation, const Tensor& energy, const Tensor& budget,
                    const Tensor& starts, const Tensor& may, const Tensor& n_far,
                    const Tensor& n_near, const Tensor& far_ranks, const Tensor& near_places,
                    int64_t rows_of_block, int64_t most_of_block, double disagrees,
                    double small_budget, Tensor rows, Tensor weights, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const float* off = arguments.read<float>("deviation", deviation, {kAny, kAny, kAny});
  const int64_t B = deviation.size(0), H = deviation.size(1), L = deviation.size(2);
  const int64_t n_q = blocks_of(L, kBlockQ);
  const float* squares = arguments.read<float>("energy", energy, {B, H, n_q});
  const double* limit = read_budget(&arguments, budget, H);
  CheckedPlaces p{};
  p.starts = arguments.read<int64_t>("starts", starts, {kAny});
  p.n = starts.size(0);
  p.may = arguments.read<bool>("may", may, {p.n, kBlockQ});
  p.n_far = arguments.read<int64_t>("n_far", n_far, {p.n});
  p.n_near = arguments.read<int64_t>("n_near", n_near, {p.n});
  p.far_ranks = arguments.read<int64_t>("far_ranks", far_ranks, {p.n, kAny});
  p.most_ranks = far_ranks.size(1);
  p.near_places = arguments.read<int64_t>("near_places", near_places, {p.n, kBlockQ});
  RowCounts counts{};
  counts.most = in_range("most_of_block", most_of_block, 2, kBlockQ);
  counts.rows = in_range("rows_of_block", rows_of_block, 1, counts.most);
  counts.disagrees = Arguments::finite("disagrees", disagrees);
  Arguments::finite("small_budget", small_budget);
  in_range("far_ranks.shape[1]", p.most_ranks, counts.slots_far(), kBlockQ);
  // Bytes of torch's bools can be any; the counts below are of ones.
  all_in_range("bytes of may", reinterpret_cast<const uint8_t*>(p.may), p.n * kBlockQ, 0, 1);
  for (int64_t i = 0; i < p.n; ++i) {
    in_range("starts", p.starts[i], 0, L - 1);
    if (p.starts[i] % kBlockQ) refuse("starts must be first rows of query blocks");
    // Each block has the places that are counted as far and near, and lists them first.
    const int64_t valid = std::min<int64_t>(kBlockQ, L - p.starts[i]);
    int64_t open = 0;
    for (int64_t r = 0; r < valid; ++r) open += p.may[i * kBlockQ + r];
    in_range("n_far", p.n_far[i], 1, open);
    in_range("n_near", p.n_near[i], 0, open - p.n_far[i]);
    all_in_range("far_ranks", p.far_ranks + i * p.most_ranks, counts.slots_far(), 0,
                 p.n_far[i] - 1);
    bool seen[kBlockQ] = {};
    for (int64_t j = 0; j < kBlockQ; ++j) {
      const int64_t place = in_range("near_places", p.near_places[i * kBlockQ + j], 0, kBlockQ - 1);
      if (seen[place] || (j < open && !(place < valid && p.may[i * kBlockQ + place])))
        refuse("near_places must list every place once, those that may be checked first");
      seen[place] = true;
    }
  }
  const int64_t n = p.n * counts.most;
  int64_t* out = arguments.write<int64_t>("rows", rows, {B, H, n});
  double* shares = arguments.write<double>("weights", weights, {2, B, H, n});
  run_tasks(k, B * H, 64, nullptr, [&](int64_t head, char*) {
    choose_rows(off + head * L, squares + head * n_q, L, limit[head % H] < small_budget, p, counts,
                out + head * n, shares + head * n, shares + (B * H + head) * n);
  });
}

void draw_measured_op(const Tensor& rows, const Tensor& weights, const Tensor& dropped,
                      const Tensor& mean, const Tensor& steps, double reference, double phase,
                      int64_t strata, Tensor to_rows, Tensor to_weights, Tensor to_dropped,
                      int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  Surveyed s{};
  s.rows = arguments.read<int64_t>("rows", rows, {kAny, kAny, kAny});
  const int64_t B = rows.size(0), H = rows.size(1);
  s.n = rows.size(2);
  all_in_range("rows", s.rows, B * H * s.n, -1, kMaxLength - 1);
  s.weights = arguments.read<double>("weights", weights, {2, B, H, s.n});
  s.dropped = arguments.read<float>("dropped", dropped, {B, H, s.n, kAny});
  s.n_steps = dropped.size(3);
  s.mean = arguments.read<double>("mean", mean, {2, B, H, s.n_steps});
  Drawing d{};
  d.reference = Arguments::finite("reference", reference);
  d.phase = Arguments::finite("phase", phase);
  d.strata = in_range("strata", strata, 1, kBlockQ);  // times a rank it fits int64
  d.steps = arguments.read<int32_t>("steps", steps, {kAny});
  d.n_measured = steps.size(0);
  all_in_range("steps", d.steps, d.n_measured, 0, s.n_steps - 1);
  int64_t* out = arguments.write<int64_t>("to_rows", to_rows, {B, H, kAny});
  d.m = to_rows.size(2);
  double* shares = arguments.write<double>("to_weights", to_weights, {B, H, d.m});
  float* of_rows = arguments.write<float>("to_dropped", to_dropped, {B, H, d.m, d.n_measured});
  run_tasks(k, B * H, 64, nullptr, [&](int64_t head, char*) {
    Surveyed own = s;
    own.rows += head * s.n, own.weights += head * s.n, own.mean += head * s.n_steps;
    own.dropped += head * s.n * s.n_steps;
    draw_measured(own, d, out + head * d.m, shares + head * d.m,
                  of_rows + head * d.m * d.n_measured);
  });
}

void decide_op(const Tensor& mean, const Tensor& deviation, const Tensor& heaviest,
               const Tensor& skipping, const Tensor& total, const Tensor& whole,
               const Tensor& weights, const Tensor& dropped, const Tensor& budget, int64_t Hk,
               bool may_raise, const Tensor& next_measured, const Tensor& sparser,
               int64_t sparse_steps, double z, double tail, double lean, double resolved,
               double least_error, double raise_from, double small_budget, double prior,
               double least_rate, double sparse_rate, double most_rate, Tensor step,
               Tensor measured, int64_t isa) {
  kernels_of(isa);
  Arguments arguments;
  HeadFacts f{};
  f.mean[0] = arguments.read<double>("mean", mean, {2, kAny, kAny, kAny});
  const int64_t B = mean.size(1), H = mean.size(2), heads = B * H;
  f.n_steps = mean.size(3);
  f.deviation[0] = arguments.read<double>("deviation", deviation, {2, B, H, f.n_steps});
  f.heaviest[0] = arguments.read<double>("heaviest", heaviest, {2, B, H, f.n_steps});
  f.skipping = arguments.read<double>("skipping", skipping, {B, H, kAny, kAny});
  f.m = skipping.size(2), f.n_measured = skipping.size(3);
  f.total = arguments.read<double>("total", total, {B, H, f.m, f.n_measured + 1});
  f.whole = arguments.read<double>("whole", whole, {B, H, f.m});
  f.weights = arguments.read<double>("weights", weights, {B, H, f.m});
  f.dropped = arguments.read<float>("dropped", dropped, {B, H, f.m, f.n_measured});
  const double* limit = read_budget(&arguments, budget, H);
  if (in_range("Hk", Hk, 1, H), H % Hk) refuse("Hk must divide the ", H, " heads, got ", Hk);
  DecisionRules rules{};
  rules.z = Arguments::finite("z", z);
  rules.tail = Arguments::finite("tail", tail);
  rules.lean = Arguments::finite("lean", lean);
  rules.resolved = Arguments::finite("resolved", resolved);
  rules.least_error = Arguments::finite("least_error", least_error);
  rules.raise_from = Arguments::finite("raise_from", raise_from);
  rules.small_budget = Arguments::finite("small_budget", small_budget);
  rules.prior = Arguments::finite("prior", prior);
  rules.least_rate = Arguments::finite("least_rate", least_rate);
  rules.sparse_rate = Arguments::finite("sparse_rate", sparse_rate);
  rules.most_rate = Arguments::finite("most_rate", most_rate);
  rules.sparse_steps = in_range("sparse_steps", sparse_steps, 0, f.n_measured);
  rules.next_measured = arguments.read<int32_t>("next_measured", next_measured, {f.n_steps});
  rules.sparser = arguments.read<int32_t>("sparser", sparser, {f.n_steps});
  all_in_range("next_measured", rules.next_measured, f.n_steps, 0, f.n_measured - 1);
  all_in_range("sparser", rules.sparser, f.n_steps, 0, f.n_steps - 1);
  int64_t* to_step = arguments.write<int64_t>("step", step, {B, H});
  double* out = arguments.write<double>("measured", measured, {3, B, H});
  std::vector<Curves> curves;
  curves.reserve(size_t(heads));
  for (int64_t head = 0; head < heads; ++head) {
    HeadFacts own = f;
    for (int k = 0; k < 2; ++k) {
      const int64_t at = (k * heads + head) * f.n_steps;
      own.mean[k] = f.mean[0] + at, own.deviation[k] = f.deviation[0] + at;
      own.heaviest[k] = f.heaviest[0] + at;
    }
    own.skipping += head * f.m * f.n_measured, own.total += head * f.m * (f.n_measured + 1);
    own.whole += head * f.m, own.weights += head * f.m, own.dropped += head * f.m * f.n_measured;
    curves.emplace_back(rules, own);
  }
  decide(curves, B, H, Hk, limit, may_raise, to_step, out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "choose_rows(Tensor deviation, Tensor energy, Tensor budget, Tensor starts, Tensor may, "
      "Tensor n_far, Tensor n_near, Tensor far_ranks, Tensor near_places, int rows_of_block, "
      "int most_of_block, float disagrees, float small_budget, Tensor(a!) rows, "
      "Tensor(b!) weights, int isa) -> ()");
  m.def(
      "draw_measured(Tensor rows, Tensor weights, Tensor dropped, Tensor mean, Tensor steps, "
      "float reference, float phase, int strata, Tensor(a!) to_rows, Tensor(b!) to_weights, "
      "Tensor(c!) to_dropped, int isa) -> ()");
  m.def(
      "decide(Tensor mean, Tensor deviation, Tensor heaviest, Tensor skipping, Tensor total, "
      "Tensor whole, Tensor weights, Tensor dropped, Tensor budget, int Hk, bool may_raise, "
      "Tensor next_measured, Tensor sparser, int sparse_steps, float z, float tail, float lean, "
      "float resolved, float least_error, float raise_from, float small_budget, float prior, "
      "float least_rate, float sparse_rate, float most_rate, Tensor(a!) step, "
      "Tensor(b!) measured, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("choose_rows", TORCH_BOX(&choose_rows_op));
  m.impl("draw_measured", TORCH_BOX(&draw_measured_op));
  m.impl("decide", TORCH_BOX(&decide_op));
}

}  // namespace sparge
