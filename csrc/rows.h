// Reading and writing rows of any dtype and stride as fp32.
#pragma once

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

inline F16 read_lanes(const char* p, Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return load(reinterpret_cast<const float*>(p));
    case Dtype::bf16:
      return load_bf16(p);
    case Dtype::f16:
      return load_f16(p);
    default:
      return load_i8(reinterpret_cast<const int8_t*>(p));
  }
}

// n numbers of a row; `out` has room for a multiple of 16, and what is behind n becomes 0.
inline void read_row(const Rows& x, const char* row, int64_t n, float* out) {
  int64_t i = 0;
  if (x.stride_d == bytes_of(x.dtype))
    for (; i + kLanes <= n; i += kLanes) store(out + i, read_lanes(row + i * x.stride_d, x.dtype));
  for (; i < n; ++i) out[i] = read_one(row + i * x.stride_d, x.dtype);
  for (; i < round_up(n, kLanes); ++i) out[i] = 0.0f;
}

// Contiguous rows; `x` has room for a multiple of 16.
inline void write_row(char* out, Dtype dtype, int64_t n, const float* x) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    char* p = out + i * bytes_of(dtype);
    const F16 lanes = load(x + i);
    if (dtype == Dtype::f32)
      store(reinterpret_cast<float*>(p), lanes);
    else if (dtype == Dtype::bf16)
      store_bf16(p, lanes);
    else
      store_f16(p, lanes);
  }
  for (; i < n; ++i) write_one(out + i * bytes_of(dtype), dtype, x[i]);
}

// What the 16-bit precisions compute with: fp32 rounded to bf16, its largest numbers to the
// largest of bf16.
inline F16 half_of(F16 x) {
  constexpr float most = 3.3895313892515355e38f;
  const F16 lowered = max(all(-most), min(all(most), x));
  // min and max give their second operand for NaN; infinities stay what they are.
  const Lanes infinite = at_least(abs(x), all(INFINITY));
  const F16 bounded = select(infinite, x, lowered);
  alignas(64) uint16_t half[kLanes];
  store_bf16(half, bounded);
  return load_bf16(half);
}

inline float lane_max(F16 a) {
  alignas(64) float x[kLanes];
  store(x, a);
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}
// The order of the additions is fixed: by halves.
inline float lane_sum(F16 a) {
  alignas(64) float x[kLanes];
  store(x, a);
  for (int n = kLanes / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}

}  // namespace
}  // namespace sparge
