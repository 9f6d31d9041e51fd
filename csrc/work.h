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

// Where what stages leave for later ones lies. Null: in the memory of the call.
struct Places {
  int8_t* kinds = nullptr;  // [1|B, 1|Hq, n_q, n_k]
  float* sums = nullptr;    // [B, Hk, n_k, D] of keys / 128
  float* mean = nullptr;    // [B, Hk, D]
  int8_t* q_codes = nullptr;
  float *q_scale = nullptr, *q_pooled = nullptr, *q_similarity = nullptr, *lse_shift = nullptr;
  int8_t* k_codes = nullptr;
  float *k_scale = nullptr, *k_pooled = nullptr, *k_similarity = nullptr;
  int8_t* v_codes = nullptr;
  float* v_scale = nullptr;  // [B, Hk, n_k, Dv]
  // Pooled entries [B, Hk, entries, D]: codes, or the dtype in which the precision pools.
  char *entry_key = nullptr, *entry_value = nullptr;
  float *entry_k_scale = nullptr, *entry_v_scale = nullptr;
  float* mass = nullptr;  // [B, Hq, n_q, n_k]
  // Of an error budget.
  float *deviation = nullptr, *energy = nullptr;               // [B, Hq, Lq], [B, Hq, n_q]
  int64_t *surveyed = nullptr, *drawn = nullptr;               // [B, Hq, n], [B, Hq, m]
  double *survey_weights = nullptr, *drawn_weights = nullptr;  // [2, B, Hq, n], [B, Hq, m]
  float *dropped = nullptr, *drawn_dropped = nullptr;  // [B, Hq, n, steps], [.., m, measured]
  double* survey = nullptr;  // [3, 2, B, Hq, steps] mean, deviation, heaviest
  double *skipping = nullptr, *total = nullptr, *whole = nullptr;
  int64_t* step = nullptr;  // [B, Hq]
};

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
