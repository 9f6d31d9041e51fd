// Reading and writing rows of any dtype and stride as fp32.
#pragma once

#include <type_traits>

#include "args.h"

namespace sparge {
namespace {

constexpr Lanes kAllLanes = 0xffff;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline float read_one(const char* p, Dtype dtype) {
  uint16_t half;
  float x;
  switch (dtype) {
    case Dtype::f32:
      std::memcpy(&x, p, 4);
      return x;
    case Dtype::bf16:
      std::memcpy(&half, p, 2);
      return from_bf16(half);
    case Dtype::f16:
      std::memcpy(&half, p, 2);
      return from_f16(half);
    default:
      return float(int8_t(*p));
  }
}
inline void write_one(char* p, Dtype dtype, float x) {
  uint16_t half;
  switch (dtype) {
    case Dtype::f32:
      std::memcpy(p, &x, 4);
      return;
    case Dtype::bf16:
      half = to_bf16(x);
      std::memcpy(p, &half, 2);
      return;
    default:
      half = to_f16(x);
      std::memcpy(p, &half, 2);
  }
}
inline int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2;
}

template <Dtype kType>
inline F32x16 read_lanes(const char* p) {
  if constexpr (kType == Dtype::f32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kType == Dtype::bf16) return load_bf16(p);
  if constexpr (kType == Dtype::f16) return load_f16(p);
  if constexpr (kType == Dtype::i8) return load_i8(reinterpret_cast<const int8_t*>(p));
}

// Calls f with the dtype as a constant, so that the choice is outside of the loops.
template <class F>
inline void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32:
      return f(std::integral_constant<Dtype, Dtype::f32>());
    case Dtype::bf16:
      return f(std::integral_constant<Dtype, Dtype::bf16>());
    case Dtype::f16:
      return f(std::integral_constant<Dtype, Dtype::f16>());
    default:
      return f(std::integral_constant<Dtype, Dtype::i8>());
  }
}

inline bool has_dense_rows(const Rows& x) { return x.stride_d == bytes_of(x.dtype); }

// n numbers of a row; `out` has room for a multiple of 16, zeros after n.
inline void read_row(const Rows& x, const char* row, int64_t n, float* out) {
  int64_t i = 0;
  if (has_dense_rows(x))
    with_dtype(x.dtype, [&](auto type) {
      for (; i + kLanes <= n; i += kLanes) store(out + i, read_lanes<type()>(row + i * x.stride_d));
    });
  for (; i < n; ++i) out[i] = read_one(row + i * x.stride_d, x.dtype);
  for (; i < round_up(n, kLanes); ++i) out[i] = 0.0f;
}

// Contiguous rows; `x` has room for a multiple of 16.
inline void write_row(char* out, Dtype dtype, int64_t n, const float* x) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    char* p = out + i * bytes_of(dtype);
    const F32x16 lanes = load(x + i);
    if (dtype == Dtype::f32)
      store(reinterpret_cast<float*>(p), lanes);
    else if (dtype == Dtype::bf16)
      store_bf16(p, lanes);
    else
      store_f16(p, lanes);
  }
  for (; i < n; ++i) write_one(out + i * bytes_of(dtype), dtype, x[i]);
}

// fp32 rounded to bf16, as the 16-bit precisions use it; finite numbers stay finite.
inline F32x16 half_of(F32x16 x) {
  constexpr float most = 3.3895313892515355e38f;
  const F32x16 lowered = max(broadcast(-most), min(broadcast(most), x));
  // min and max return their second operand for NaN; infinities are kept.
  const Lanes infinite = at_least(abs(x), broadcast(INFINITY));
  const F32x16 bounded = select(infinite, x, lowered);
  alignas(64) uint16_t half[kLanes];
  store_bf16(half, bounded);
  return load_bf16(half);
}

// Sum of one row of 8-bit codes.
inline int32_t sum_of_codes(const Rows& x, const char* row, int64_t n) {
  int32_t sum = 0;
  if (x.stride_d == 1 && n % 64 == 0) {
    for (int64_t d = 0; d < n; d += 64) sum += sum_i8(reinterpret_cast<const int8_t*>(row) + d);
    return sum;
  }
  if (x.stride_d == 1)
    for (int64_t d = 0; d < n; ++d) sum += int8_t(row[d]);
  else
    for (int64_t d = 0; d < n; ++d) sum += int8_t(row[d * x.stride_d]);
  return sum;
}

}  // namespace
}  // namespace sparge
