// Which queries of a row group may attend each key of a block, and the bias that is added.
#pragma once

#include "read_rows.h"

namespace sparge {
namespace {

// The lanes that may attend each of the 64 keys of a block.
struct GroupMask {
  uint16_t may[kBlockK];
  uint16_t any;  // lanes that may attend some key
  bool has_bias;
  alignas(64) float bias[kBlockK * kLanes];
};

inline float mask_value(const TokenMask& t, const char* p) {
  return read_one(p, t.type == MaskType::f32    ? Dtype::f32
                     : t.type == MaskType::bf16 ? Dtype::bf16
                                                : Dtype::f16);
}

// `rows` holds the query row of each lane; lanes from `n_rows` on may attend nothing.
inline void mask_group(const TokenMask& t, const Shape& s, int64_t b, int64_t h,
                       const int64_t* rows, int n_rows, int64_t i_k, GroupMask* out) {
  const int64_t first_k = i_k * kBlockK;
  out->any = 0;
  out->has_bias = t.type != MaskType::none && t.type != MaskType::boolean;
  if (t.type == MaskType::none) {
    // The diagonal alone: the last key that each lane may attend, relative to the block's first.
    alignas(64) float last[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      int64_t k =
          (t.is_causal && i < n_rows && rows[i] + t.offset < s.Lk ? rows[i] + t.offset : s.Lk - 1) -
          first_k;
      k = k < -1 ? -1 : k > kBlockK ? kBlockK : k;
      last[i] = i < n_rows ? float(k) : -1.0f;
    }
    const F32x16 lanes = load(last);
    for (int j = 0; j < kBlockK; ++j) {
      out->may[j] = uint16_t(at_least(lanes, broadcast(float(j))));
      out->any |= out->may[j];
    }
    return;
  }
  const char* head = t.data + b * t.stride_b + h * t.stride_h;
  for (int j = 0; j < kBlockK; ++j) {
    const int64_t k = first_k + j;
    uint32_t may = 0;
    if (k < s.Lk) {
      for (int i = 0; i < n_rows; ++i)
        may |= uint32_t(!t.is_causal || k <= rows[i] + t.offset) << i;
      if (t.type == MaskType::boolean) {
        for (int i = 0; i < n_rows; ++i)
          if (may >> i & 1) may &= ~(uint32_t(!head[rows[i] * t.stride_q + k * t.stride_k]) << i);
      } else if (t.type != MaskType::none) {
        for (int i = 0; i < n_rows; ++i) {
          const float x = mask_value(t, head + rows[i] * t.stride_q + k * t.stride_k);
          if (x == -INFINITY) may &= ~(1u << i);
          out->bias[j * kLanes + i] = x;
        }
      }
    }
    out->may[j] = uint16_t(may);
    out->any |= uint16_t(may);
    if (out->has_bias) {
      for (int i = k < s.Lk ? n_rows : 0; i < kLanes; ++i) out->bias[j * kLanes + i] = 0.0f;
      // Masked lanes keep a finite bias: -inf comes from `may` alone.
      for (int i = 0; i < kLanes; ++i)
        if (!(may >> i & 1)) out->bias[j * kLanes + i] = 0.0f;
    }
  }
}

}  // namespace
}  // namespace sparge
