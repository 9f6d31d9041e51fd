// One pass over K after its mean, one over Q, one over V: smoothing, pooled token,
// self-similarity, codes and scales of a block while its rows are in the cache.
//
//   x'      = x - mean
//   pooled  = mean of the block's rows x'
//   s       = || mean of x' / ||x'|| ||²
//   codes   = round(x' / scale), scale = max|x'| / 127 of each row
#pragma once

#include "rows.h"

namespace sparge {
namespace {

// Rows are lowered by this before they are added, so that a sum of finite rows is finite.
constexpr float kLowered = 1.0f / kBlockQ;

// Sum of some rows, lowered; the caller adds blocks up in fp64.
void sum_rows(const Rows& x, int64_t b, int64_t h, int64_t start, int64_t stop, int64_t D,
              float* sum) {
  alignas(64) float row[kMaxDim], total[kMaxDim];
  const int64_t width = round_up(D, kLanes);
  for (int64_t d = 0; d < width; d += kLanes) store(total + d, zero());
  for (int64_t l = start; l < stop; ++l) {
    read_row(x, x.row(b, h, l), D, row);
    for (int64_t d = 0; d < width; d += kLanes)
      store(total + d, fma(load(row + d), all(kLowered), load(total + d)));
  }
  std::memcpy(sum, total, size_t(D) * 4);
}

// NaN where the row is not finite.
inline float largest_of(const float* row, int64_t width) {
  F16 most = zero();
  Lanes finite = kAllLanes;
  for (int64_t d = 0; d < width; d += kLanes) {
    const F16 x = abs(load(row + d));
    finite &= less(x, all(INFINITY));
    most = max(x, most);
  }
  return finite == kAllLanes ? lane_max(most) : NAN;
}

inline float quantize_row(const float* row, int64_t D, float largest, int8_t* codes) {
  const float scale = largest / 127.0f;
  const bool finite = scale - scale == 0.0f;
  if (!finite || scale == 0.0f) {
    std::memset(codes, 0, size_t(D));
    return finite ? 0.0f : NAN;
  }
  alignas(64) int8_t last[kLanes];
  for (int64_t d = 0; d < D; d += kLanes) {
    const F16 code = max(all(-127.0f), min(all(127.0f), round(load(row + d) / all(scale))));
    if (d + kLanes <= D) {
      store_i8(codes + d, code);
    } else {
      store_i8(last, code);
      std::memcpy(codes + d, last, size_t(D - d));
    }
  }
  return scale;
}

inline float dot(const float* a, const float* b, int64_t width) {
  F16 sum = zero();
  for (int64_t d = 0; d < width; d += kLanes) sum = fma(load(a + d), load(b + d), sum);
  return lane_sum(sum);
}

// Adds x / ||x|| to the sum of unit rows; divided by its largest entry first, so that squares
// neither overflow nor vanish. A zero row adds nothing.
inline void add_unit(const float* row, int64_t width, float largest, float* units) {
  if (largest == 0.0f) return;
  alignas(64) float unit[kMaxDim];
  for (int64_t d = 0; d < width; d += kLanes) store(unit + d, load(row + d) / all(largest));
  const float norm = std::sqrt(dot(unit, unit, width));
  for (int64_t d = 0; d < width; d += kLanes)
    store(units + d, load(units + d) + load(unit + d) / all(norm));
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
    if (a.mean)
      for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) - load(mean + d));
    if (a.pooled)
      for (int64_t d = 0; d < width; d += kLanes)
        store(pooled + d, fma(load(row + d), all(kLowered), load(pooled + d)));
    const float largest = largest_of(row, width);
    if (a.similarity) add_unit(row, width, largest, units);
    if (a.codes)
      a.scale[bh * a.L + l] = quantize_row(row, a.D, largest, a.codes + (bh * a.L + l) * a.D);
    if (a.lse_shift) a.lse_shift[bh * a.L + l] = dot(row, key_mean, width) * a.softmax_scale;
  }
  const float count = float(stop - start);
  if (a.pooled) {
    for (int64_t d = 0; d < width; d += kLanes)
      store(pooled + d, load(pooled + d) * all(float(kBlockQ) / count));
    std::memcpy(a.pooled + task * a.D, pooled, size_t(a.D) * 4);
  }
  if (a.similarity) {
    for (int64_t d = 0; d < width; d += kLanes) store(units + d, load(units + d) / all(count));
    a.similarity[task] = dot(units, units, width);
  }
}

// One key block of V in 8 bits, a scale for each channel.
void channels(const ChannelArgs& a, int64_t task) {
  const int64_t n = (a.L + kBlockK - 1) / kBlockK, width = round_up(a.D, kLanes);
  const int64_t bh = task / n, b = bh / a.H, h = bh % a.H, start = task % n * kBlockK;
  const int64_t stop = start + kBlockK < a.L ? start + kBlockK : a.L;
  alignas(64) float block[kBlockK * kMaxDim], scale[kMaxDim];
  alignas(64) int8_t codes[kMaxDim];
  for (int64_t l = start; l < stop; ++l)
    read_row(a.value, a.value.row(b, h, l), a.D, block + (l - start) * width);
  for (int64_t d = 0; d < width; d += kLanes) {
    F16 most = zero();
    Lanes finite = kAllLanes;
    for (int64_t i = 0; i < stop - start; ++i) {
      const F16 x = abs(load(block + i * width + d));
      finite &= less(x, all(INFINITY));
      most = max(x, most);
    }
    store(scale + d, select(finite, most / all(127.0f), all(NAN)));
  }
  for (int64_t i = 0; i < stop - start; ++i) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const F16 s = load(scale + d);
      const F16 code = round(load(block + i * width + d) / s);
      const F16 bounded = max(all(-127.0f), min(all(127.0f), code));
      store_i8(codes + d, select(less(zero(), s), bounded, zero()));
    }
    std::memcpy(a.codes + (bh * a.L + start + i) * a.D, codes, size_t(a.D));
  }
  std::memcpy(a.scale + task * a.D, scale, size_t(a.D) * 4);
}

}  // namespace
}  // namespace sparge
