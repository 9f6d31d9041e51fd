// What the ops of attention check and compute of V before their tasks run.
#pragma once

#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace sparge {

// The power of two that V is multiplied by: 1, unless sums of the largest |v| would overflow, or
// all of V is so small that products which flush subnormal numbers would lose it.
inline float factor_for(float largest, int64_t Lk) {
  const float room = std::ldexp(1.0f, 126 - 6 - int(std::ceil(std::log2(double(Lk)))));
  if (largest >= room) return std::ldexp(1.0f, -8 - int(std::ceil(std::log2(double(Lk)))));
  if (largest > 0.0f && largest < 0x1p-64f) return 0x1p63f;
  return 1.0f;
}

// The value has the dtype of its precision; query and key are checked already.
inline void check_value(const AttendArgs& a) {
  const bool fast = a.precision == Precision::int8_fast;
  if ((a.value.dtype == Dtype::i8) != fast)
    refuse("value must be ", fast ? "int8 codes" : "float32, bfloat16 or float16", " in precision ",
           int(a.precision));
  if ((a.v_scale != nullptr) != fast)
    refuse(fast ? "v_scale is needed with int8 values"
                : "v_scale must be None without int8 values");
  if (a.key.dtype != Dtype::i8 && a.value.dtype != a.key.dtype)
    refuse("value must have the dtype of key");
}

// The value of a pooled entry has the dtype of V, or is fp32 in `exact`; its key that of a key.
inline void check_pooled(const AttendArgs& a, const AttendArgs& pooled) {
  const bool exact = a.precision == Precision::exact;
  auto same = [&](Dtype x, Dtype y) { return x == y || (exact && x == Dtype::f32); };
  if (!same(pooled.key.dtype, a.key.dtype))
    refuse("pooled_key must have the dtype of key", exact ? ", or float32" : "");
  if (!same(pooled.value.dtype, a.value.dtype))
    refuse("pooled_value must have the dtype of value", exact ? ", or float32" : "");
  if ((pooled.v_scale != nullptr) != (a.v_scale != nullptr))
    refuse(a.v_scale ? "pooled_v_scale is needed with int8 values"
                     : "pooled_v_scale must be None without int8 values");
}

// The bound of the outputs of one key head, of B * Hk, and the factor of its values, from the
// largest |v| of its key blocks.
inline void bound_head(const AttendArgs& a, int64_t head, const float* of_blocks, float* largest,
                       float* factor) {
  const double most = a.out_dtype == Dtype::f16    ? 65504.0
                      : a.out_dtype == Dtype::bf16 ? 3.3895313892515355e38
                                                   : 3.4028234663852886e38;
  const int64_t n_k = a.shape.n_k();
  float x = 0.0f;
  for (int64_t j = 0; j < n_k; ++j) x = std::max(x, of_blocks[head * n_k + j]);
  factor[head] = factor_for(x, a.shape.Lk);
  largest[head] = float(std::min(double(x), most));
}
inline void bound_values(const AttendArgs& a, const float* of_blocks, float* largest,
                         float* factor) {
  for (int64_t i = 0; i < a.shape.B * a.shape.Hk; ++i) bound_head(a, i, of_blocks, largest, factor);
}

}  // namespace sparge
