// Arguments of the kernels: plain structs, the same for every instruction set. Strides are in
// bytes; a kernel never sees a torch type.
#pragma once

#include <cstddef>
#include <cstdint>

// Every instruction set compiles these functions with its own flags. A copy that is not inlined
// would be merged by the linker, and could then run on a machine that lacks its instructions.
#define SPARGE_INLINE __attribute__((always_inline)) inline

namespace sparge {

constexpr int kBlockQ = 128;  // rows of a query block
constexpr int kBlockK = 64;   // rows of a key block
constexpr int kLanes = 16;    // queries of a row group: the lanes of one vector
constexpr int kGroups = kBlockQ / kLanes;
constexpr int kMaxDim = 256;
constexpr int kMaxSteps = 64;  // of an error budget: bounds the scratch

enum class Dtype : int { f32, bf16, f16, i8 };
enum class Precision : int { int8, int8_fast, half, exact };
enum class Keep : int { all, mass, fraction, error };
enum class Predictor : int { mean, rows, blend };
// Which pairs of a block may attend.
enum Kind : int8_t { kExcluded = 0, kMixed = 1, kOpen = 2 };

// A tensor [B, H, L, D] of any strides.
struct Rows {
  const char* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_l = 0, stride_d = 0;
  Dtype dtype = Dtype::f32;

  SPARGE_INLINE const char* row(int64_t b, int64_t h, int64_t l) const {
    return data + b * stride_b + h * stride_h + l * stride_l;
  }
};

// Scales of codes, one per row, contiguous [B, H, L].
struct Scales {
  const float* data = nullptr;
  int64_t L = 0;

  SPARGE_INLINE const float* head(int64_t bh) const { return data + bh * L; }
};

struct Shape {
  int64_t B, Hq, Hk, Lq, Lk, D, Dv;

  SPARGE_INLINE int64_t n_q() const { return (Lq + kBlockQ - 1) / kBlockQ; }
  SPARGE_INLINE int64_t n_k() const { return (Lk + kBlockK - 1) / kBlockK; }
  SPARGE_INLINE int64_t group() const { return Hq / Hk; }
};

enum class MaskType : int { none, boolean, f32, bf16, f16 };

// The causal diagonal and the caller's mask. Query row i may attend keys <= i + offset.
struct TokenMask {
  bool is_causal = false;
  int64_t offset = 0;
  MaskType type = MaskType::none;
  const char* data = nullptr;  // strides of broadcast dimensions are 0
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
  // Kinds of blocks under a mask, [1|B, 1|Hq, n_q, n_k]; without a mask they follow from the
  // diagonal.
  const int8_t* kinds = nullptr;
  int64_t kinds_b = 0, kinds_h = 0, kinds_q = 0;

  SPARGE_INLINE Kind kind(const Shape& s, int64_t b, int64_t h, int64_t i_q, int64_t i_k) const {
    if (kinds) return Kind(kinds[b * kinds_b + h * kinds_h + i_q * kinds_q + i_k]);
    if (!is_causal) return kOpen;
    const int64_t first_q = i_q * kBlockQ + offset;
    const int64_t rows = s.Lq - i_q * kBlockQ < kBlockQ ? s.Lq - i_q * kBlockQ : kBlockQ;
    const int64_t first_k = i_k * kBlockK;
    const int64_t keys = s.Lk - first_k < kBlockK ? s.Lk - first_k : kBlockK;
    if (first_k > first_q + rows - 1) return kExcluded;
    return first_k + keys - 1 <= first_q ? kOpen : kMixed;
  }
};

// One pass over K after its mean is known, or over Q. Outputs that are null are not computed.
struct StatisticsArgs {
  Rows x;
  int64_t H, L, D;
  int block;                    // rows of a block
  const float* mean = nullptr;  // [B, H, D], subtracted from every row; null for queries
  int8_t* codes = nullptr;      // [B, H, L, D]
  float* scale = nullptr;       // [B, H, L]
  float* pooled = nullptr;      // [B, H, n, D]
  float* similarity = nullptr;  // [B, H, n]
  // Queries: what subtracting the mean key changes in a row's scores, softmax_scale · q · mean.
  const float* key_mean = nullptr;  // [B, Hk, D]
  int64_t group = 1;
  float softmax_scale = 1.0f;
  float* lse_shift = nullptr;  // [B, H, L]
};

// V in 8 bits: one scale per key block and channel.
struct ChannelArgs {
  Rows value;
  int64_t H, L, D;
  int8_t* codes = nullptr;  // [B, H, L, D]
  float* scale = nullptr;   // [B, H, n_k, D]
};

// What exact scores are computed from.
struct ScoreArgs {
  Shape shape;
  TokenMask tokens;
  Precision precision;
  double softmax_scale;
  Rows query, key;  // int8 codes, or the caller's tensors
  Scales q_scale, k_scale;
};

// Self-similarity of blocks. The mean of a block whose similarity is below the minimum predicts
// nothing: such a row or column is kept as a whole.
struct Similarity {
  const float* minimum = nullptr;  // [Hq]; null trusts every block
  const float* query = nullptr;    // [B, Hq, n_q]
  const float* key = nullptr;      // [B, Hk, n_k]

  // `>=` and not `!(<)`: a similarity that is NaN is never trusted.
  SPARGE_INLINE bool trusts_row(const Shape& s, int64_t b, int64_t h, int64_t i_q) const {
    return !minimum || query[(b * s.Hq + h) * s.n_q() + i_q] >= minimum[h];
  }
  SPARGE_INLINE bool trusts_column(const Shape& s, int64_t b, int64_t h, int64_t i_k) const {
    return !minimum || key[(b * s.Hk + h / s.group()) * s.n_k() + i_k] >= minimum[h];
  }
};

// The mass map: the predicted share of each key block in the attention of a query block.
struct PredictArgs : ScoreArgs {
  Predictor predictor;
  int sample_rows;
  const float *q_pooled, *k_pooled;  // [B, Hq, n_q, D], [B, Hk, n_k, D]; null for `rows`
  Similarity similarity;             // only the columns are read
  float* mass;                       // rows [n_k] of the map, [B, Hq, n_q], from `mass_start` on
  int64_t mass_start;
};

// The kept blocks of every query block, from the mass map.
struct SelectArgs {
  Shape shape;
  TokenMask tokens;
  Keep keep;
  const float* mass;  // as in PredictArgs; null for Keep::all
  int64_t mass_start;
  const double* amount;  // [Hq] mass or fraction
  Similarity similarity;
  const bool* forced;  // rows [n_k] of [n_q] from `forced_start` on
  int64_t forced_start;
  int32_t *counts, *indices, *allowed;
  // Keep::error: `indices` receives for each block the first step that keeps it, -1 where no pair
  // may attend; `counts` is not written.
  const double* masses;  // [n_steps], ascending
  int n_steps;
};

// Rows of one head that a task of an error budget looks at, and their places in its outputs.
constexpr int kMaxCheckGroups = 4;  // groups of 16 rows that share one pass over K and V
struct RowTask {
  int64_t b, h;
  int n;
  int64_t row[kMaxCheckGroups * kLanes], place[kMaxCheckGroups * kLanes];
};

// The mass that each step of a budget drops from some rows.
struct SurveyArgs : ScoreArgs {
  const int32_t* first_steps;  // [B, Hq, n_q, n_k], from selection
  int n_steps;
  const RowTask* tasks;
  float* dropped;  // [places][n_steps]
};

// The error of some steps of a budget, measured on some rows.
struct BudgetArgs : SurveyArgs {
  const int32_t* slots;  // [n_steps + 1] first measured step that keeps a block of each first step
  int n_slots;           // measured steps
  ScoreArgs exact;       // scores of the caller's own tensors
  Rows value;            // the caller's own
  Rows codes;            // 8-bit V, if attention reads it
  const float* v_scale;  // [B, Hk, n_k, Dv] of it
  // What skipped blocks contribute: entries in the place of keys, each of `pool_group` keys; no
  // data where they contribute nothing. The values are fp32.
  ScoreArgs pooled;
  Rows pooled_value;
  int pool_group;
  // [places][n_slots], [places][n_slots + 1], [places]
  double *skipping, *total, *whole;
};

// Squared distances of queries from the mean of their block.
struct DeviationArgs {
  Rows query;
  int64_t H, L, D;
  float *deviation, *energy;  // [B, H, L], [B, H, n_q]
};

struct AttendArgs : ScoreArgs {
  Rows value;
  const float* v_scale;    // [B, Hk, n_k, Dv] of 8-bit V
  const float* lse_shift;  // [B, Hq, Lq] or null
  const float* pv_skip;    // of each query head; null when off, inf for a head that is off
  const int32_t *counts, *indices;
  // Facts about K and V, computed once per call.
  const uint8_t* finite;     // [B, Hk, n_k]
  const float* largest;      // [B, Hk, n_k] largest |v| of each block
  const int32_t* code_sums;  // [B, Hk, Lk] sums of key codes, where the product needs them
  const char* v_tiles;       // transposed V, where the tile unit needs it
  int64_t v_tiles_block;     // bytes of one key block of it
  const float* v_factor;     // [B, Hk] the power of two that V is multiplied by
  // What skipped blocks contribute, null where that is nothing: entries in the place of keys, each
  // the mean of `pool_group` keys (the last one of fewer). Its operands and facts alone are read.
  const AttendArgs* pooled;
  int pool_group;
  char* out;
  Dtype out_dtype;
  int64_t out_stride_h, out_stride_l;  // bytes
  float* lse;
  int64_t lse_stride_h;
  int32_t* pv_skips;
};

// Gradients of the unquantized precisions, in fp32.
struct BackwardArgs {
  Shape shape;
  TokenMask tokens;
  double softmax_scale;
  Rows query, key, value, grad_out;
  const float* delta;  // [B, Hq, Lq] rowsum(do ∘ out) - dlse
  const float* pv_skip;
  const int32_t *counts, *indices;
  float *shift, *row_sum;  // [B, Hq, Lq] written by the query pass for the key pass
  uint8_t* skipped;        // [B, Hq, n_q, n_k] bit g: row group g skipped the block
  float *grad_query, *grad_key, *grad_value;
  // Key pass: the (head of the group, query block) pairs that keep each key block.
  const int64_t* readers_start;  // [B, Hk, n_k + 1]
  const int64_t* readers;
};

// What one instruction set provides. A `task` counts blocks over all heads; `*_scratch` is the
// bytes of scratch of one thread.
struct Kernels {
  void (*enter)();  // before and after the tasks of a thread
  void (*leave)();
  void (*sum_rows)(const Rows& x, int64_t b, int64_t h, int64_t start, int64_t stop, int64_t D,
                   float* sum);
  void (*statistics)(const StatisticsArgs&, int64_t task);
  void (*channels)(const ChannelArgs&, int64_t task);
  // A task is `query_blocks_per_task` query blocks of one head.
  int query_blocks_per_task;
  size_t (*predict_scratch)(const PredictArgs&);
  void (*predict)(const PredictArgs&, int64_t task, char* scratch);
  size_t (*select_scratch)(const SelectArgs&);
  void (*select)(const SelectArgs&, int64_t task, char* scratch);
  // What an error budget looks at; a task is a query block, or a `RowTask`.
  void (*deviations)(const DeviationArgs&, int64_t task);
  size_t (*survey_scratch)(const SurveyArgs&);
  void (*survey)(const SurveyArgs&, int64_t task, char* scratch);
  size_t (*budget_scratch)(const BudgetArgs&);
  void (*budget)(const BudgetArgs&, int64_t task, char* scratch);
  // Facts about K and V that attend reads besides its operands; a task is one key block.
  bool (*needs_code_sums)(const AttendArgs&);
  int64_t (*v_tile_bytes)(const AttendArgs&);
  void (*find_kv_facts)(const AttendArgs&, int64_t task, uint8_t* finite, float* largest,
                        int32_t* code_sums);
  void (*transpose_value)(const AttendArgs&, int64_t task, char* v_tiles);
  size_t (*attend_scratch)(const AttendArgs&);
  void (*attend)(const AttendArgs&, int64_t task, char* scratch);
  size_t (*backward_scratch)(const BackwardArgs&);
  void (*backward_query)(const BackwardArgs&, int64_t task, char* scratch);
  void (*backward_key)(const BackwardArgs&, int64_t task, char* scratch);
};

}  // namespace sparge
