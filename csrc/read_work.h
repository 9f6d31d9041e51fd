// The arguments of the op `run`, by name: read from torch, checked, and made a `Work`.
#pragma once

#include <torch/csrc/stable/library.h>

#include "budget_rows.h"
#include "tensors.h"

namespace sparge {

// Every argument of the op. IN and OUT are tensors that are read, or that are read or written,
// whichever the stages say; all of them may be left out. Four more follow, because torch takes 64:
// `shape`, B, Hq, Hk, Lq, Lk, D, Dv; `budget`, the tables of an error budget (read_budget);
// `budget_places`, where it leaves what it finds (read_budget_places); `isa`.
// clang-format off
#define SPARGE_ARGUMENTS(IN, OUT, INT, FLOAT)                                                    \
  IN(query) IN(key) IN(value) IN(mask) IN(key_mean)                                              \
  OUT(kinds) OUT(sums) OUT(mean) OUT(q_codes) OUT(q_scale) OUT(q_pooled) OUT(q_similarity)       \
  OUT(lse_shift) OUT(k_codes) OUT(k_scale) OUT(k_pooled) OUT(k_similarity) OUT(v_codes)          \
  OUT(v_scale) OUT(entry_key) OUT(entry_k_scale) OUT(entry_value) OUT(entry_v_scale) OUT(mass)   \
  OUT(counts) OUT(indices) OUT(allowed) OUT(measured) OUT(out) OUT(lse) OUT(pv_skips)            \
  IN(amount) IN(min_similarity) IN(protect) IN(pv_skip) IN(raised)                               \
  IN(q_rows) IN(k_rows) IN(offsets) IN(limits) OUT(attended) OUT(seconds)                        \
  INT(first) INT(last) INT(planned) INT(is_causal) INT(offset) INT(precision) INT(keep)          \
  INT(predictor) INT(sample_rows) INT(sink_blocks) INT(window) INT(pool_group) INT(threads)      \
  FLOAT(softmax_scale) FLOAT(most_kept) FLOAT(pooled_cost) FLOAT(raised_cost)
// clang-format on

#define SPARGE_TENSOR(name) MaybeTensor name;
#define SPARGE_INT(name) int64_t name;
#define SPARGE_FLOAT(name) double name;
#define SPARGE_READ(name) name = torch::stable::detail::to<decltype(name)>(stack[n++]);
#define SPARGE_SCHEMA_IN(name) "Tensor? " #name "=None, "
#define SPARGE_SCHEMA_OUT(name) "Tensor(" #name "!)? " #name "=None, "
#define SPARGE_SCHEMA_INT(name) "int " #name "=0, "
#define SPARGE_SCHEMA_FLOAT(name) "float " #name "=0., "

struct Given {
  SPARGE_ARGUMENTS(SPARGE_TENSOR, SPARGE_TENSOR, SPARGE_INT, SPARGE_FLOAT)

  std::vector<int64_t> shape;
  std::optional<std::vector<Tensor>> budget, budget_places;
  int64_t isa;

  explicit Given(StableIValue* stack) {
    int n = 0;
    SPARGE_ARGUMENTS(SPARGE_READ, SPARGE_READ, SPARGE_READ, SPARGE_READ)
    SPARGE_READ(shape)
    SPARGE_READ(budget)
    SPARGE_READ(budget_places)
    SPARGE_READ(isa)
  }
};

// Each has a default. Python passes all by position (library.py), because torch makes a Python
// string of every name that it looks up.
constexpr const char* kRunSchema = "run(" SPARGE_ARGUMENTS(
    SPARGE_SCHEMA_IN, SPARGE_SCHEMA_OUT, SPARGE_SCHEMA_INT, SPARGE_SCHEMA_FLOAT) "int[] shape=[], Tensor[]? budget=None, "
    "Tensor[]? budget_places=None, int isa=-1) -> bool";

class WorkReader {
 public:
  Work w;

  // Checks everything but the tables of a pack, and what depends on the shape of a sequence.
  WorkReader(const Given& given, Arguments* arguments) : g(given), a(*arguments) {
    read_shape();
    w.first = Stage(in_range("first", g.first, 0, int64_t(Stage::attend)));
    w.last = Stage(in_range("last", g.last, g.first, int64_t(Stage::attend)));
    w.planned = g.planned != 0;
    w.tokens = Arguments::diagonal(g.is_causal != 0, g.offset);
    w.softmax_scale = Arguments::finite("softmax_scale", g.softmax_scale);
    w.precision = Precision(in_range("precision", g.precision, 0, int64_t(Precision::exact)));
    read_recipe();
    read_inputs();
    if (w.runs(Stage::select) && w.keep == Keep::error) read_budget();
    w.most_kept = Arguments::finite("most_kept", g.most_kept);
    w.pooled_cost = Arguments::finite("pooled_cost", g.pooled_cost);
    w.raised_cost = Arguments::finite("raised_cost", g.raised_cost);
    w.raised = a.read<bool>("raised", g.raised, {w.shape.Hk});
  }

  // Of one call that is no pack: what its stages leave, read or write.
  void read_places() {
    const Shape& s = w.shape;
    if (g.mask) {
      a.take_mask(&w.tokens, *g.mask, s);
      w.mask_b = g.mask->size(0), w.mask_h = g.mask->size(1);
    }
    if (g.kinds && !g.mask) refuse("kinds must be None without a mask");
    const int64_t n_q = s.n_q(), n_k = s.n_k(), mask_b = w.mask_b, mask_h = w.mask_h;
    const int64_t E = w.pool_group ? blocks_of(s.Lk, w.pool_group) : 0;
#define SPARGE_PLACE(name, type, stage, ...) \
  w.places.name = a.place<type>(#name, g.name, {__VA_ARGS__}, w.runs(Stage::stage));
    SPARGE_PLACES(SPARGE_PLACE)
#undef SPARGE_PLACE
    const Dtype pooled = w.precision == Precision::exact ? Dtype::f32 : w.value.dtype;
    w.places.entry_key = place_rows("entry_key", g.entry_key, {s.B, s.Hk, E, s.D},
                                    w.quantized() ? Dtype::i8 : pooled);
    w.places.entry_value = place_rows("entry_value", g.entry_value, {s.B, s.Hk, E, s.Dv},
                                      w.fast() ? Dtype::i8 : pooled);
    const bool selects = w.runs(Stage::select);
    w.counts = a.place<int32_t>("counts", g.counts, {s.B, s.Hq, n_q}, selects);
    w.indices = a.place<int32_t>("indices", g.indices, {s.B, s.Hq, n_q, n_k}, selects);
    w.allowed = a.place<int32_t>("allowed", g.allowed, {s.B, s.Hq, n_q}, selects);
    w.pv_skips = a.write<int32_t>("pv_skips", g.pv_skips, {s.B, s.Hq, n_q});
    w.measured = a.write<double>("measured", g.measured, {3, s.B, s.Hq});
    w.lse = a.write<float>("lse", g.lse, {s.B, s.Hq, s.Lq});
    w.lse_stride_h = s.Lq;
    if (g.out) {
      w.out = a.write_floats("out", *g.out, {s.B, s.Hq, s.Lq, s.Dv}, &w.out_dtype);
      w.out_stride_l = s.Dv * int64_t(g.out->element_size());
      w.out_stride_h = s.Lq * w.out_stride_l;
    }
    if (w.rules) read_budget_places();
    check_stages();
  }

 private:
  const Given& g;
  Arguments& a;
  BudgetRules rules;

  void need(bool there, const char* name, const char* what) const {
    if (!there) refuse(name, " is needed by ", what);
  }
  char* place_rows(const char* name, const MaybeTensor& x, const Sizes& sizes, Dtype needed) {
    if (!x) return nullptr;
    Dtype dtype;
    char* data = a.place_rows(name, *x, sizes, &dtype, w.runs(Stage::prepare));
    if (dtype != needed) refuse(name, " must have the dtype in which the precision pools");
    return data;
  }

  // Without queries, or without keys, there are none to prepare.
  void read_shape() {
    if (g.shape.size() != 7)
      refuse("shape must be B, Hq, Hk, Lq, Lk, D, Dv, got ", g.shape.size(), " numbers");
    static const char* names[] = {"B", "Hq", "Hk", "Lq", "Lk", "D", "Dv"};
    for (int i = 0; i < 7; ++i) {
      const bool length = i == 3 || i == 4;
      in_range(names[i], g.shape[size_t(i)], length ? 0 : 1, i < 5 ? kMaxLength : kMaxDim);
    }
    const int64_t* x = g.shape.data();
    w.shape = {x[0], x[1], x[2], x[3], x[4], x[5], x[6]};
    const Shape& s = w.shape;
    if (s.Hq % s.Hk) refuse("Hq must be a multiple of Hk ", s.Hk, ", got ", s.Hq);
    if (s.Lq + s.Lk == 0) refuse("Lq or Lk must be at least 1, got 0 and 0");
    // What is computed from sizes fits 64 bits.
    const double numbers =
        double(s.B) * double(s.Hq) * double(s.Lq + s.Lk) * double(s.n_k() + 1) * double(s.D + s.Dv);
    if (numbers > double(kMaxNumbers)) refuse("shape is too large");
  }

  void read_inputs() {
    const Shape& s = w.shape;
    if (g.query) w.query = a.float_rows("query", *g.query, {s.B, s.Hq, s.Lq, s.D});
    if (g.key) w.key = a.float_rows("key", *g.key, {s.B, s.Hk, s.Lk, s.D});
    if (g.value) w.value = a.float_rows("value", *g.value, {s.B, s.Hk, s.Lk, s.Dv});
    const Rows* given[] = {&w.query, &w.key, &w.value};
    for (const Rows* x : given)
      for (const Rows* y : given)
        if (x->data && y->data && x->dtype != y->dtype)
          refuse("query, key and value must have one dtype");
    w.key_mean = a.read<float>("key_mean", g.key_mean, {s.B, s.Hk, s.D});
  }

  void read_recipe() {
    const int64_t Hq = w.shape.Hq;
    w.keep = Keep(in_range("keep", g.keep, 0, int64_t(Keep::error)));
    w.amount = a.read<double>("amount", g.amount, {Hq});
    need(w.amount || !w.runs(Stage::select) || w.keep == Keep::all, "amount", "this keep");
    if (w.amount) check_between("amount", w.amount, Hq, 0.0, w.keep == Keep::error ? 1e300 : 1.0);
    w.predictor = Predictor(in_range("predictor", g.predictor, 0, int64_t(Predictor::blend)));
    w.sample_rows =
        int(in_range("sample_rows", g.sample_rows, w.keep == Keep::all ? 0 : 1, kBlockQ));
    w.min_similarity = a.read<float>("min_similarity", g.min_similarity, {Hq});
    w.forced = {in_range("sink_blocks", g.sink_blocks, 0, kMaxLength),
                in_range("window", g.window, 0, kMaxLength), nullptr, 0};
    if (g.protect) {
      w.forced.protect = a.read<int64_t>("protect", *g.protect, {kAny, 2});
      w.forced.n_protected = g.protect->size(0);
      for (int64_t i = 0; i < 2 * w.forced.n_protected; ++i)
        in_range("protect", w.forced.protect[i], -kMaxOffset, kMaxOffset);
    }
    w.pv_skip = a.read<float>("pv_skip", g.pv_skip, {Hq});
    w.pool_group = int(in_range("pool_group", g.pool_group, 0, kBlockK));
    if (w.pool_group && kBlockK % w.pool_group)
      refuse("pool_group must divide ", kBlockK, " or be 0, got ", w.pool_group);
  }

  // rules, masses, measured_steps, next_measured, sparser, rows_by_blocks: see work.h.
  void read_budget() {
    if (!g.budget || g.budget->size() != 6) refuse("budget, six tables, is needed by this keep");
    const std::vector<Tensor>& table = *g.budget;
    const double* numbers = a.read<double>("rules", table[0], {kBudgetNumbers});
    for (int64_t i = 0; i < kBudgetNumbers; ++i) Arguments::finite("rules", numbers[i]);
    std::memcpy(&rules, numbers, sizeof(rules));
    BudgetSteps& t = w.steps;
    t.masses = a.read<double>("masses", table[1], {kAny});
    t.n_steps = int(in_range("the number of masses", table[1].size(0), 1, kMaxSteps));
    check_between("masses", t.masses, t.n_steps, 0.0, 1.0);
    if (!std::is_sorted(t.masses, t.masses + t.n_steps)) refuse("masses must not fall");
    t.measured = a.read<int32_t>("measured_steps", table[2], {kAny});
    t.n_measured = int(in_range("the number of measured_steps", table[2].size(0), 1, t.n_steps));
    for (int i = 0; i < t.n_measured; ++i)
      in_range("measured_steps", t.measured[i], i ? t.measured[i - 1] + 1 : 0, t.n_steps - 1);
    t.next_measured = a.read<int32_t>("next_measured", table[3], {t.n_steps});
    t.sparser = a.read<int32_t>("sparser", table[4], {t.n_steps});
    for (int i = 0; i < t.n_steps; ++i) {
      in_range("next_measured", t.next_measured[i], 0, t.n_measured - 1);
      in_range("sparser", t.sparser[i], 0, t.n_steps - 1);
    }
    t.rows_by_blocks = a.read<int64_t>("rows_by_blocks", table[5], {kAny, 3});
    t.n_rows = table[5].size(0);
    for (int64_t i = 0; i < t.n_rows; ++i) {
      const int64_t most = in_range("rows_by_blocks", t.rows_by_blocks[3 * i + 2], 4, kBlockQ);
      in_range("rows_by_blocks", t.rows_by_blocks[3 * i + 1], 1, most);
    }
    check_between("sparse_steps of rules", &rules.sparse_steps, 1, 0, t.n_measured);
    check_between("strata of rules", &rules.strata, 1, 1, kBlockQ);
    check_between("measured_rows of rules", &rules.measured_rows, 1, 1, 1 << 16);
    check_between("many_blocks of rules", &rules.many_blocks, 1, 1, double(kMaxLength));
    check_between("far_share of rules", &rules.far_share, 1, 1, kBlockQ);
    w.rules = &rules;
  }
  void read_budget_places() {
    if (!g.budget_places) return;
    const Shape& s = w.shape;
    const int64_t S = w.steps.n_steps, C = w.steps.n_measured, m = int64_t(rules.measured_rows);
    const RowCounts counts(w.steps, rules, s.n_q());
    const int64_t n =
        counts.most * int64_t(checked_blocks(s.Lq, w.sample_rows, rules, counts).size());
    const std::vector<Tensor>& given = *g.budget_places;
    size_t i = 0;
#define SPARGE_PLACE(name, type, ...) \
  if (i < given.size()) w.places.name = a.write<type>(#name, given[i++], {__VA_ARGS__});
    SPARGE_BUDGET_PLACES(SPARGE_PLACE)
#undef SPARGE_PLACE
    if (i != given.size() || !w.places.step) refuse("budget_places must be 13 tensors");
  }

  // Every stage has what it reads, and places for what it returns.
  void check_stages() const {
    const Places& p = w.places;
    const bool prepared = !w.runs(Stage::prepare), some = w.keep != Keep::all;
    const bool budgets = w.runs(Stage::select) && w.keep == Keep::error;
    const bool predicts = w.runs(Stage::predict) && some, attends = w.runs(Stage::attend);
    const bool scores = attends || budgets || (predicts && w.predictor != Predictor::mean);
    if (w.last == Stage::mask) return need(g.mask && g.kinds, "kinds", "the stage mask");
    if (!(prepared && w.first > Stage::predict && !scores) && w.last != Stage::prepare) {
      need(w.shape.Lq && w.shape.Lk, "Lq and Lk", "every stage but prepare");
    }
    if (w.last == Stage::prepare) {
      need(!w.shape.Lq || w.query.data, "query", "Lq");
      need(!w.shape.Lk || w.key.data, "key", "Lk");
      const bool of_keys = p.k_codes || p.k_pooled || p.k_similarity || p.entry_key;
      need(!of_keys || w.key_mean || p.mean || !w.quantized(), "mean", "codes of keys");
      need(!p.lse_shift || w.key_mean, "key_mean", "lse_shift");
      need(!(p.v_codes || p.entry_key) || w.value.data, "value", "v_codes and entry_key");
    } else {
      const bool coded = prepared && w.quantized() && scores;
      if (coded) {
        need(p.q_codes && p.k_codes, "q_codes and k_codes", "this precision");
      } else if (scores || !prepared) {
        need(w.query.data && w.key.data, "query and key", "these stages");
      }
      const bool values = attends || budgets, fast = prepared && w.fast();
      need(!values || (fast ? p.v_codes != nullptr : w.value.data != nullptr),
           fast ? "v_codes" : "value", "these stages");
      need(!(budgets || w.raised) || (w.query.data && w.key.data && w.value.data),
           "query, key and value", "an error budget and raised heads");
      if (prepared && w.pool_group && values) {
        need(p.entry_key && p.entry_value, "entry_key and entry_value", "pool_group");
        need(p.entry_k_scale || !w.quantized(), "entry_k_scale", "this precision");
        need(p.entry_v_scale || !w.fast(), "entry_v_scale", "this precision");
      }
      if (prepared && predicts)
        need(w.predictor == Predictor::rows || (p.q_pooled && p.k_pooled), "q_pooled and k_pooled",
             "this predictor");
      if (prepared && some && w.min_similarity) {
        need(p.k_similarity || w.first > Stage::select, "k_similarity", "min_similarity");
        need(p.q_similarity || !w.runs(Stage::select), "q_similarity", "min_similarity");
      }
      need(p.mass || !some || w.first != Stage::select, "mass", "the stage select");
      need(p.mass || w.last != Stage::predict || !some, "mass", "the stage predict");
      need((w.counts && w.indices && w.allowed) || !w.runs(Stage::select) || attends,
           "counts, indices and allowed", "planning alone");
      need(w.measured || !budgets, "measured", "an error budget");
      need((w.out && w.lse && w.pv_skips) || !attends, "out, lse and pv_skips", "the stage attend");
      need((w.counts && w.indices) || !attends || w.runs(Stage::select), "counts and indices",
           "attention without the stage select");
    }
    need(!p.q_codes == !p.q_scale, p.q_codes ? "q_scale" : "q_codes", "codes with their scales");
    need(!p.k_codes == !p.k_scale, p.k_codes ? "k_scale" : "k_codes", "codes with their scales");
    need(!p.v_codes == !p.v_scale, p.v_codes ? "v_scale" : "v_codes", "codes with their scales");
    need(!p.entry_key == !p.entry_value, "entry_key", "entry_value, and the other way round");
  }
};

}  // namespace sparge
