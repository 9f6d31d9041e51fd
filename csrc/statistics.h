// One pass over K after its mean, one over Q, one over V: smoothing, pooled token,
// self-similarity, codes and scales of a block while its rows are in the cache.
//
//   x'      = x - mean
//   pooled  = mean of the block's rows x'
//   s       = || mean of x' / ||x'|| ||²
//   codes   = round(y / scale), scale = max|y| / 127 of each row, y = x' rotated (rotate.h)
#pragma once

#include "rotate.h"

namespace sparge {
namespace {

// Rows are scaled by this before they are added, so that a sum of finite rows is finite.
constexpr float kLowered = 1.0f / kBlockQ;

// Scaled sum of some rows; the caller adds the sums of blocks in fp64.
void sum_rows(const Rows& x, int64_t b, int64_t h, int64_t start, int64_t stop, int64_t D,
              float* sum) {
  int64_t d = 0;
  if (has_dense_rows(x))
    with_dtype(x.dtype, [&](auto type) {
      for (; d + kLanes <= D; d += kLanes) {
        F32x16 total = zero();
        for (int64_t l = start; l < stop; ++l)
          total =
              fma(read_lanes<type()>(x.row(b, h, l) + d * x.stride_d), broadcast(kLowered), total);
        store(sum + d, total);
      }
    });
  for (; d < D; ++d) {
    sum[d] = 0.0f;
    for (int64_t l = start; l < stop; ++l)
      sum[d] += read_one(x.row(b, h, l) + d * x.stride_d, x.dtype) * kLowered;
  }
}

// The largest |x| of some numbers, and whether all of them are finite.
struct Largest {
  F32x16 most = zero(), lost = zero();
  void add(F32x16 x) {
    most = max(abs(x), most);
    lost = fma(x, zero(), lost);  // NaN once a number is not finite
  }
  Lanes finite() const { return at_least(lost, lost); }
  float value() const { return finite() == kAllLanes ? lane_max(most) : NAN; }
};

// The largest |x| of a row; NaN if the row is not finite.
inline float largest_of(const float* row, int64_t width) {
  Largest largest;
  for (int64_t d = 0; d < width; d += kLanes) largest.add(load(row + d));
  return largest.value();
}

// round(x / scale), in -127 … 127, for |x| of at most 127 scales. x · (1 / scale) is off by less
// than 2⁻¹⁵; the division is needed only near a tie, or if 1 / scale overflowed.
inline F32x16 code_of(F32x16 x, F32x16 scale, F32x16 inverse) {
  const F32x16 y = x * inverse, code = round(y);
  if (less(abs(y - code), broadcast(0.5f - 0x1p-15f)) == kAllLanes) return code;
  return max(broadcast(-127.0f), min(broadcast(127.0f), round(x / scale)));
}

// Stores 16 codes of a row from d on, but none after D.
inline void store_codes(int8_t* row, int64_t d, int64_t D, F32x16 code) {
  if (d + kLanes <= D) return store_i8(row + d, code);
  alignas(64) int8_t last[kLanes];
  store_i8(last, code);
  std::memcpy(row + d, last, size_t(D - d));
}

inline float quantize_row(const float* row, int64_t D, float largest, int8_t* codes) {
  const float scale = largest / 127.0f;
  const bool finite = scale - scale == 0.0f;
  if (!finite || scale == 0.0f) {
    std::memset(codes, 0, size_t(D));
    return finite ? 0.0f : NAN;
  }
  const F32x16 scales = broadcast(scale), inverse = broadcast(1.0f / scale);
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) store_i8(codes + d, code_of(load(row + d), scales, inverse));
  if (d < D) {
    alignas(64) int8_t last[kLanes];
    store_i8(last, code_of(load(row + d), scales, inverse));
    std::memcpy(codes + d, last, size_t(D - d));
  }
  return scale;
}

// Codes of the rotated row, which replaces the row; returns their scale. Rotation can make a number
// 16 times as large: rows near the end of fp32's range are lowered for it.
inline float rotate_and_quantize(float* row, int64_t D, float largest, int8_t* codes) {
  const int64_t width = round_up(D, kLanes);
  const bool lowered = largest > 0x1p100f;
  for (int64_t d = 0; lowered && d < width; d += kLanes)
    store(row + d, load(row + d) * broadcast(0x1p-8f));
  rotate(row, D);
  const float scale = quantize_row(row, D, largest_of(row, width), codes);
  return lowered ? scale * 0x1p8f : scale;
}

inline float dot(const float* a, const float* b, int64_t width) {
  F32x16 sum = zero();
  for (int64_t d = 0; d < width; d += kLanes) sum = fma(load(a + d), load(b + d), sum);
  return lane_sum(sum);
}

// Adds x / ||x|| to the sum of unit rows. x is divided by its largest entry first, so that squares
// neither overflow nor underflow. A zero row adds nothing.
inline void add_unit(const float* row, int64_t width, float largest, float* units) {
  if (largest == 0.0f) return;
  const float lift = largest < 0x1p-60f ? 0x1p60f : 1.0f;  // else 1 / largest may overflow
  const F32x16 lifts = broadcast(lift), inverse = broadcast(1.0f / (largest * lift));
  F32x16 squares = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    const F32x16 x = load(row + d) * lifts * inverse;
    squares = fma(x, x, squares);
  }
  const F32x16 norm = broadcast(1.0f / std::sqrt(lane_sum(squares)));
  for (int64_t d = 0; d < width; d += kLanes)
    store(units + d, fma(load(row + d) * lifts * inverse, norm, load(units + d)));
}

void statistics(const StatisticsArgs& a, int64_t task) {
  const int64_t n = (a.L + a.block - 1) / a.block, width = round_up(a.D, kLanes);
  const int64_t bh = task / n, b = bh / a.H, h = bh % a.H, start = task % n * a.block;
  const int64_t stop = start + a.block < a.L ? start + a.block : a.L;
  alignas(64) float row[kMaxDim], pooled[kMaxDim] = {}, units[kMaxDim] = {};
  alignas(64) float mean[kMaxDim] = {}, key_mean[kMaxDim] = {};
  if (a.mean) std::memcpy(mean, a.mean + bh * a.D, size_t(a.D) * 4);
  if (a.lse_shift)
    std::memcpy(key_mean, a.key_mean + (b * (a.H / a.group) + h / a.group) * a.D, size_t(a.D) * 4);
  for (int64_t l = start; l < stop; ++l) {
    read_row(a.x, a.x.row(b, h, l), a.D, row);
    Largest of_row;
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32x16 x = load(row + d) - load(mean + d);
      store(row + d, x);
      store(pooled + d, fma(x, broadcast(kLowered), load(pooled + d)));
      of_row.add(x);
    }
    const float largest = of_row.value();
    if (a.similarity) add_unit(row, width, largest, units);
    if (a.lse_shift) a.lse_shift[bh * a.L + l] = dot(row, key_mean, width) * a.softmax_scale;
    if (a.codes)
      a.scale[bh * a.L + l] =
          rotate_and_quantize(row, a.D, largest, a.codes + (bh * a.L + l) * a.D);
  }
  const float count = float(stop - start);
  if (a.pooled) {
    for (int64_t d = 0; d < width; d += kLanes)
      store(pooled + d, load(pooled + d) * broadcast(float(kBlockQ) / count));
    std::memcpy(a.pooled + task * a.D, pooled, size_t(a.D) * 4);
  }
  if (a.similarity) {
    for (int64_t d = 0; d < width; d += kLanes)
      store(units + d, load(units + d) / broadcast(count));
    a.similarity[task] = dot(units, units, width);
  }
}

// One key block of V in 8 bits, a scale for each channel.
void channels(const ChannelArgs& a, int64_t task) {
  const int64_t n = (a.L + kBlockK - 1) / kBlockK, width = round_up(a.D, kLanes);
  const int64_t bh = task / n, b = bh / a.H, h = bh % a.H, start = task % n * kBlockK;
  const int64_t rows = start + kBlockK < a.L ? kBlockK : a.L - start;
  alignas(64) float block[kBlockK * kMaxDim], scales[kMaxDim];
  for (int64_t i = 0; i < rows; ++i)
    read_row(a.value, a.value.row(b, h, start + i), a.D, block + i * width);
  for (int64_t d = 0; d < width; d += kLanes) {
    Largest largest;
    for (int64_t i = 0; i < rows; ++i) largest.add(load(block + i * width + d));
    const F32x16 scale = select(largest.finite(), largest.most / broadcast(127.0f), broadcast(NAN));
    const F32x16 inverse = broadcast(1.0f) / scale;
    const Lanes live = less(zero(), scale);
    store(scales + d, scale);
    for (int64_t i = 0; i < rows; ++i) {
      F32x16 code = code_of(load(block + i * width + d), scale, inverse);
      if (live != kAllLanes) code = select(live, code, zero());
      store_codes(a.codes + (bh * a.L + start + i) * a.D, d, a.D, code);
    }
  }
  std::memcpy(a.scale + task * a.D, scales, size_t(a.D) * 4);
}

}  // namespace
}  // namespace sparge
