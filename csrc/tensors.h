// Torch's tensors as the nouns of args.h.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "args.h"

namespace sparge {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::Char:
      return Dtype::i8;
    default:
      STD_TORCH_CHECK(false, "sparge: a dtype that the cpu backend does not have");
  }
}
inline Rows rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4, "sparge: [B, H, L, D] is wanted");
  const int64_t size = int64_t(x.element_size());
  Rows rows;
  rows.data = static_cast<const char*>(x.data_ptr());
  rows.stride_b = x.stride(0) * size;
  rows.stride_h = x.stride(1) * size;
  rows.stride_l = x.stride(2) * size;
  rows.stride_d = x.stride(3) * size;
  rows.dtype = dtype_of(x);
  return rows;
}
inline Scales scales_of(const MaybeTensor& x, int64_t rows_per_scale) {
  Scales scales;
  if (!x) return scales;
  STD_TORCH_CHECK(x->is_contiguous() && x->dim() == 3, "sparge: contiguous scales are wanted");
  scales.data = static_cast<const float*>(x->data_ptr());
  scales.per_head = x->size(2);
  scales.rows_per_scale = rows_per_scale;
  return scales;
}
// Data of a contiguous tensor, or null.
template <class T>
T* data_of(const MaybeTensor& x) {
  if (!x) return nullptr;
  STD_TORCH_CHECK(x->is_contiguous(), "sparge: a contiguous tensor is wanted");
  STD_TORCH_CHECK(x->element_size() == sizeof(T), "sparge: a tensor of another dtype is wanted");
  return static_cast<T*>(x->data_ptr());
}
template <class T>
T* data_of(const Tensor& x) {
  return data_of<T>(MaybeTensor(x));
}

// What scores are made of, for planning and for attending.
template <class Args>
void take_scored(Args* a, const Tensor& query, const Tensor& key, const MaybeTensor& q_scale,
                 int64_t q_rows_per_scale, const MaybeTensor& k_scale, int64_t k_rows_per_scale,
                 int64_t precision, double softmax_scale) {
  a->query = rows_of(query);
  a->key = rows_of(key);
  a->q_scale = scales_of(q_scale, q_rows_per_scale);
  a->k_scale = scales_of(k_scale, k_rows_per_scale);
  a->precision = Precision(precision);
  a->softmax_scale = softmax_scale;
}

inline TokenMask mask_of(const MaybeTensor& mask, const MaybeTensor& kinds, bool is_causal,
                         int64_t offset) {
  TokenMask t;
  t.is_causal = is_causal;
  t.offset = offset;
  if (!mask) return t;
  switch (mask->scalar_type()) {
    case ScalarType::Bool:
      t.type = MaskType::boolean;
      break;
    case ScalarType::Float:
      t.type = MaskType::f32;
      break;
    case ScalarType::BFloat16:
      t.type = MaskType::bf16;
      break;
    case ScalarType::Half:
      t.type = MaskType::f16;
      break;
    default:
      STD_TORCH_CHECK(false, "sparge: a mask of a dtype that the cpu backend does not have");
  }
  const int64_t size = int64_t(mask->element_size());
  auto stride = [&](int64_t d) { return mask->size(d) == 1 ? 0 : mask->stride(d) * size; };
  t.data = static_cast<const char*>(mask->data_ptr());
  t.stride_b = stride(0);
  t.stride_h = stride(1);
  t.stride_q = stride(2);
  t.stride_k = stride(3);
  if (kinds) {
    t.kinds = data_of<int8_t>(*kinds);
    t.kinds_q = kinds->size(3);
    t.kinds_h = kinds->size(1) == 1 ? 0 : kinds->size(2) * kinds->size(3);
    t.kinds_b = kinds->size(0) == 1 ? 0 : kinds->size(1) * kinds->size(2) * kinds->size(3);
  }
  return t;
}

}  // namespace sparge
