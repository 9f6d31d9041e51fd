// One description of a native call: its tensors, its recipe, and which stages run. Made once from
// checked tensors (read_work.h); nothing here is a torch type.
#pragma once

#include "args.h"
#include "forced.h"

namespace sparge {

// In the order of a call. A call runs those from `first` to `last`; what earlier stages make is
// given to it. `mask` finds the kinds of blocks under a mask.
enum class Stage : int { mask, prepare, predict, select, attend };
constexpr int kTimedStages = 4;  // all but `mask`, whose time counts as that of `prepare`

// The numbers of rules/error_budget.py, in the order of its `NUMBERS`.
struct BudgetRules {
  double z, tail, lean, resolved, least_error, raise_from, small_budget, prior;
  double least_rate, sparse_rate, most_rate, disagrees, reference, phase;
  double sparse_steps, strata, measured_rows, many_blocks, far_share;  // whole numbers
};
constexpr int64_t kBudgetNumbers = sizeof(BudgetRules) / sizeof(double);

// Its tables. A step of a budget keeps a share of the mass; behind the last, everything is kept.
struct BudgetSteps {
  const double* masses = nullptr;  // [n_steps], rising
  int n_steps = 0;
  const int32_t* measured = nullptr;  // [n_measured] steps that measured rows look at
  int n_measured = 0;
  const int32_t* next_measured = nullptr;   // [n_steps] the measured step that each step looks at
  const int32_t* sparser = nullptr;         // [n_steps]
  const int64_t* rows_by_blocks = nullptr;  // [n_rows][3] up to so many blocks: rows, most rows
  int64_t n_rows = 0;
};

// What stages leave for later ones: name, type, the stage that makes it, and sizes, in terms of a
// shape `s`, its `n_q` and `n_k`, a mask's `mask_b` and `mask_h`, and `E` pooled entries.
// clang-format off
#define SPARGE_PLACES(X) \
  X(kinds, int8_t, mask, mask_b, mask_h, n_q, n_k) \
  X(sums, float, prepare, s.B, s.Hk, n_k, s.D) /* of keys / 128 */ \
  X(mean, float, prepare, s.B, s.Hk, s.D) \
  X(q_codes, int8_t, prepare, s.B, s.Hq, s.Lq, s.D) \
  X(q_scale, float, prepare, s.B, s.Hq, s.Lq) \
  X(q_pooled, float, prepare, s.B, s.Hq, n_q, s.D) \
  X(q_similarity, float, prepare, s.B, s.Hq, n_q) \
  X(lse_shift, float, prepare, s.B, s.Hq, s.Lq) \
  X(k_codes, int8_t, prepare, s.B, s.Hk, s.Lk, s.D) \
  X(k_scale, float, prepare, s.B, s.Hk, s.Lk) \
  X(k_pooled, float, prepare, s.B, s.Hk, n_k, s.D) \
  X(k_similarity, float, prepare, s.B, s.Hk, n_k) \
  X(v_codes, int8_t, prepare, s.B, s.Hk, s.Lk, s.Dv) \
  X(v_scale, float, prepare, s.B, s.Hk, n_k, s.Dv) \
  X(entry_k_scale, float, prepare, s.B, s.Hk, E) \
  X(entry_v_scale, float, prepare, s.B, s.Hk, (E + kBlockK - 1) / kBlockK, s.Dv) \
  X(mass, float, predict, s.B, s.Hq, n_q, n_k)
// The same of an error budget that surveys n rows of a head, measures m, and has S steps of which
// it measures C. `survey` holds mean, deviation and heaviest; weights are of two kinds.
#define SPARGE_BUDGET_PLACES(X)                \
  X(deviation, float, s.B, s.Hq, s.Lq)         \
  X(energy, float, s.B, s.Hq, s.n_q())         \
  X(surveyed, int64_t, s.B, s.Hq, n)           \
  X(survey_weights, double, 2, s.B, s.Hq, n)   \
  X(dropped, float, s.B, s.Hq, n, S)           \
  X(survey, double, 3, 2, s.B, s.Hq, S)        \
  X(drawn, int64_t, s.B, s.Hq, m)              \
  X(drawn_weights, double, s.B, s.Hq, m)       \
  X(drawn_dropped, float, s.B, s.Hq, m, C)     \
  X(skipping, double, s.B, s.Hq, m, C)         \
  X(total, double, s.B, s.Hq, m, C + 1)        \
  X(whole, double, s.B, s.Hq, m)               \
  X(step, int64_t, s.B, s.Hq)
// clang-format on

// Where it lies. Null: in the memory of the call.
struct Places {
#define SPARGE_PLACE(name, type, ...) type* name = nullptr;
  SPARGE_PLACES(SPARGE_PLACE)
  SPARGE_BUDGET_PLACES(SPARGE_PLACE)
#undef SPARGE_PLACE
  // Pooled entries [B, Hk, E, D]: codes, or the dtype in which the precision pools.
  char *entry_key = nullptr, *entry_value = nullptr;
};

// Product of sizes.
template <class... Sizes>
constexpr int64_t numbers_in(Sizes... sizes) {
  return (int64_t(sizes) * ... * 1);
}

struct Work {
  Shape shape{};
  Stage first = Stage::mask, last = Stage::attend;
  bool planned = false;  // the lists are given: neither predicts nor selects
  TokenMask tokens;
  int64_t mask_b = 0, mask_h = 0;   // sizes of the mask; 0 without one
  Rows query, key, value;           // the caller's own; no data where no stage reads them
  const float* key_mean = nullptr;  // [B, Hk, D], where it is not to be computed of these keys

  Precision precision = Precision::exact;
  double softmax_scale = 1.0;
  Keep keep = Keep::all;
  const double* amount = nullptr;  // [Hq] mass, fraction or error
  Forced forced{};
  Predictor predictor = Predictor::mean;
  int sample_rows = 1;
  const float* min_similarity = nullptr;  // [Hq] or null
  const float* pv_skip = nullptr;         // [Hq] or null
  int pool_group = 0;                     // 0 where skipped blocks contribute nothing
  const BudgetRules* rules = nullptr;
  BudgetSteps steps;
  // [Hk] key heads that attend in the caller's own precision; null: none, or those that an error
  // budget finds.
  const bool* raised = nullptr;
  // Attends only if kept blocks (those of raised heads `raised_cost` times, and `pooled_cost` times
  // the allowed ones if any is skipped) are fewer than `most_kept`; 0 is always.
  double most_kept = 0.0, pooled_cost = 0.0, raised_cost = 1.0;

  Places places;
  int32_t *counts = nullptr, *indices = nullptr, *allowed = nullptr, *pv_skips = nullptr;
  double* measured = nullptr;  // [3, B, Hq]
  char* out = nullptr;
  Dtype out_dtype = Dtype::f32;
  int64_t out_stride_h = 0, out_stride_l = 0;  // bytes
  float* lse = nullptr;
  int64_t lse_stride_h = 0;

  bool runs(Stage stage) const {
    const bool plans = stage == Stage::predict || stage == Stage::select;
    return first <= stage && stage <= last && !(plans && planned);
  }
  bool quantized() const {
    return precision == Precision::int8 || precision == Precision::int8_fast;
  }
  bool fast() const { return precision == Precision::int8_fast; }
  Precision own_precision() const {
    return value.dtype == Dtype::f32 ? Precision::exact : Precision::half;
  }
};

}  // namespace sparge
