// The nouns that cross from the ops to the kernels: plain structs, the same for every
// instruction set. Strides are in bytes; a kernel never sees a torch type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparge {

constexpr int kBlockQ = 128;  // rows of a query block
constexpr int kBlockK = 64;   // rows of a key block
constexpr int kLanes = 16;    // queries of a row group: the lanes of one vector
constexpr int kGroups = kBlockQ / kLanes;
constexpr int kMaxDim = 256;

enum class Dtype : int { f32, bf16, f16, i8 };
enum class Precision : int { int8, int8_fast, half, exact };
enum class Keep : int { all, mass, fraction, error };
enum class Predictor : int { mean, rows, blend };
// Which pairs of a block may attend.
enum Kind : int8_t { kExcluded = 0, kMixed = 1, kOpen = 2 };

// A tensor [B, H, L, D] as it lies in memory.
struct Rows {
  const char* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_l = 0, stride_d = 0;
  Dtype dtype = Dtype::f32;

  const char* row(int64_t b, int64_t h, int64_t l) const {
    return data + b * stride_b + h * stride_h + l * stride_l;
  }
};

// Scales of codes: one per `rows_per_scale` rows, contiguous [B, H, ceil(L / rows_per_scale)].
struct Scales {
  const float* data = nullptr;
  int64_t per_head = 0;
  int64_t rows_per_scale = 1;

  const float* head(int64_t bh) const { return data + bh * per_head; }
  float of(int64_t bh, int64_t l) const { return head(bh)[l / rows_per_scale]; }
};

struct Shape {
  int64_t B, Hq, Hk, Lq, Lk, D, Dv;

  int64_t n_q() const { return (Lq + kBlockQ - 1) / kBlockQ; }
  int64_t n_k() const { return (Lk + kBlockK - 1) / kBlockK; }
  int64_t group() const { return Hq / Hk; }
};

enum class MaskType : int { none, boolean, f32, bf16, f16 };

// The causal diagonal and the caller's mask. Query row i stands at key position i + offset.
struct TokenMask {
  bool is_causal = false;
  int64_t offset = 0;
  MaskType type = MaskType::none;
  const char* data = nullptr;  // strides of broadcast dimensions are 0
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
  // Kinds of blocks where there is a mask, [1|B, 1|Hq, n_q, n_k]; without one they follow from
  // the diagonal.
  const int8_t* kinds = nullptr;
  int64_t kinds_b = 0, kinds_h = 0, kinds_q = 0;

  Kind kind(const Shape& s, int64_t b, int64_t h, int64_t i_q, int64_t i_k) const {
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

// One pass over K after its mean is known, or over Q. Outputs that are null are not made.
struct StatisticsArgs {
  Rows x;
  int64_t H, L, D;
  int block;          // rows of a block
  const float* mean;  // [B, H, D], taken from every row; null for queries
  int8_t* codes;      // [B, H, L, D]
  float* scale;       // [B, H, L]
  float* pooled;      // [B, H, n, D]
  float* similarity;  // [B, H, n]
  // Queries: what smoothing the keys takes from a row's scores, softmax_scale · q · mean.
  const float* key_mean;  // [B, Hk, D]
  int64_t group;
  float softmax_scale;
  float* lse_shift;  // [B, H, L]
};

// V in 8 bits: one scale per key block and channel.
struct ChannelArgs {
  Rows value;
  int64_t H, L, D;
  int8_t* codes;  // [B, H, L, D]
  float* scale;   // [B, H, n_k, D]
};

// What the predictors and the selection read and write; one task is `query_blocks` of one head.
struct PlanArgs {
  Shape shape;
  TokenMask tokens;
  Predictor predictor;
  Keep keep;
  Precision precision;
  double softmax_scale;
  int sample_rows;
  const double* amount;         // mass or fraction of each query head
  const float* min_similarity;  // of each query head; null without a judge
  const float *q_pooled, *k_pooled, *q_similarity, *k_similarity;
  Rows query, key;  // codes, or the caller's tensors
  Scales q_scale, k_scale;
  const int8_t* forced;  // [n_q, n_k]
  int32_t *counts, *indices, *allowed;
  // Keep::error: the indices hold of every block the first step that keeps it, for `check` to
  // measure what each step costs the checked rows. These come in groups of 16, and one task of it
  // is `check_groups` of one head.
  Rows value;
  const double* masses;  // [Hq, n_steps], rising
  int n_steps;
  const int64_t* checked;
  int64_t n_checked;
  int check_groups;
  double *wrong, *whole;  // [B, Hq, groups, n_steps], [B, Hq, groups]
};

struct AttendArgs {
  Shape shape;
  TokenMask tokens;
  Precision precision;
  double softmax_scale;
  Rows query, key, value;
  Scales q_scale, k_scale;
  const float* v_scale;    // [B, Hk, n_k, Dv] of 8-bit V
  const float* lse_shift;  // [B, Hq, Lq] or null
  const float* pv_skip;    // of each query head; null when off, inf for a head that is off
  const int32_t *counts, *indices;
  // Made once per call from K and V.
  const uint8_t* finite;     // [B, Hk, n_k]
  const float* largest;      // [B, Hk, n_k] largest |v| of each block
  const int32_t* code_sums;  // [B, Hk, Lk] sums of key codes, where the product wants them
  const char* v_tiles;       // transposed V, where the tile unit wants it
  int64_t v_tiles_block;     // bytes of one key block of it
  const float* v_factor;     // [B, Hk] the power of two that V is multiplied by
  char* out;
  Dtype out_dtype;
  float* lse;
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
  float *shift, *row_sum;  // [B, Hq, Lq] made by the query pass for the key pass
  uint8_t* skipped;        // [B, Hq, n_q, n_k] bit g: row group g skipped the block
  float *grad_query, *grad_key, *grad_value;
  // Key pass: the (head of the group, query block) pairs that keep each key block.
  const int64_t* readers_start;  // [B, Hk, n_k + 1]
  const int64_t* readers;
};

// What one instruction set can do. `task` counts blocks over all heads.
struct Kernels {
  const char* name;
  void (*enter)();  // before and after the tasks of a thread
  void (*leave)();
  void (*sum_rows)(const Rows& x, int64_t b, int64_t h, int64_t start, int64_t stop, int64_t D,
                   float* sum);
  void (*statistics)(const StatisticsArgs&, int64_t task);
  void (*channels)(const ChannelArgs&, int64_t task);
  size_t (*plan_scratch)(const PlanArgs&);
  void (*plan)(const PlanArgs&, int64_t task, char* scratch);
  int plan_query_blocks;  // query blocks of one plan task
  size_t (*check_scratch)(const PlanArgs&);
  void (*check)(const PlanArgs&, int64_t task, char* scratch);
  int most_check_groups;
  // What attend reads besides its operands, made block by block of K and V.
  bool (*wants_code_sums)(const AttendArgs&);
  int64_t (*v_tile_bytes)(const AttendArgs&);
  void (*look_at_block)(const AttendArgs&, int64_t task, uint8_t* finite, float* largest,
                        int32_t* code_sums);
  void (*tile_value)(const AttendArgs&, int64_t task, char* v_tiles);
  size_t (*attend_scratch)(const AttendArgs&);
  void (*attend)(const AttendArgs&, int64_t task, char* scratch);
  size_t (*backward_scratch)(const BackwardArgs&);
  void (*backward_query)(const BackwardArgs&, int64_t task, char* scratch);
  void (*backward_key)(const BackwardArgs&, int64_t task, char* scratch);
};

}  // namespace sparge
