// Online softmax of one row group: 16 queries are 16 lanes, a key block is 64 rows of scores.
//
//   s        = scores in base 2, -inf where masked
//   skip     = the second filter: every row is pv_skip below its row_max
//   p        = 2^(s - shift), row_sum += Σ p
// `shift` follows row_max only when a row's maximum rises by more than kRescaleStep: the
// accumulator is rescaled rarely, and P may exceed 1, which fp32 sums and 16-bit P can hold.
#pragma once

#include "mask.h"
#include "product.h"

namespace sparge {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kRescaleStep = 6.0f;

struct alignas(64) GroupState {
  float row_max[kLanes];  // true running maximum, -inf before any
  float shift[kLanes];    // subtracted from the scores; finite, 0 before any maximum
  float row_sum[kLanes];
  float q_factor[kLanes];  // softmax_scale · log2(e) · scale of the query's codes
  uint16_t valid;          // lanes that hold a query
  uint16_t may;            // lanes that had a pair to attend
};

// The maximum, and NaN where either is NaN; `max` would return its second operand.
inline F32x16 max_or_nan(F32x16 a, F32x16 b) { return select(at_least(a, a), max(a, b), a); }

template <bool kInteger>
inline F32x16 scaled_product(const float* s, int j, const float* k_scale, F32x16 q_factor) {
  if constexpr (kInteger)
    return to_float(iload(reinterpret_cast<const int32_t*>(s + j * kLanes))) *
           (q_factor * broadcast(k_scale[j]));
  else
    return load(s + j * kLanes) * q_factor;
}

// Turns products into scores, in place; returns the block's maximum of each row. A NaN bias makes
// it NaN, so that the second filter does not skip a block that makes the row NaN.
template <bool kInteger>
inline F32x16 scale_scores(float* s, int from, int to, const float* k_scale, F32x16 q_factor,
                           const GroupMask* mask, float bias_factor, F32x16 block_max) {
  auto scaled = [&](int j) { return scaled_product<kInteger>(s, j, k_scale, q_factor); };
  if (!mask) {
    // Two maxima, for even and odd keys: a single one would be a chain of four cycles per key.
    F32x16 odd_max = block_max;
    for (int j = from; j < to; j += 2) {
      const F32x16 x = scaled(j), y = scaled(j + 1);
      store(s + j * kLanes, x);
      store(s + (j + 1) * kLanes, y);
      block_max = max(x, block_max);
      odd_max = max(y, odd_max);
    }
    return max(odd_max, block_max);
  }
  Lanes broken = 0;
  for (int j = from; j < to; ++j) {
    F32x16 x = scaled(j);
    if (mask->has_bias) {
      // The lowest finite bias is a number and not a mask; it must not overflow to -inf.
      x = fma(load(mask->bias + j * kLanes), broadcast(bias_factor), x);
      x = max(broadcast(-3.4028234663852886e38f), x);
      broken |= ~at_least(x, x);
    }
    x = select(mask->may[j], x, broadcast(-INFINITY));
    store(s + j * kLanes, x);
    block_max = max(x, block_max);
  }
  return broken & kAllLanes ? select(broken, broadcast(NAN), block_max) : block_max;
}

// The same for pooled entries: `bias` is log2 of the keys of each, -inf where it contributes
// nothing.
template <bool kInteger>
inline F32x16 scale_entries(float* s, int from, int to, const float* k_scale, F32x16 q_factor,
                            const float* bias, F32x16 block_max) {
  for (int j = from; j < to; ++j) {
    F32x16 x = broadcast(-INFINITY);
    // Not by adding -inf: a product that overflowed would become NaN.
    if (bias[j] > -INFINITY)
      x = scaled_product<kInteger>(s, j, k_scale, q_factor) + broadcast(bias[j]);
    store(s + j * kLanes, x);
    block_max = max(x, block_max);
  }
  return block_max;
}

// The second filter: every row of the group is pv_skip (natural log) below its running maximum.
inline bool skips(const GroupState& g, F32x16 block_max, float pv_skip) {
  if (!(pv_skip < INFINITY)) return false;
  const Lanes low = at_least((load(g.row_max) - block_max) * broadcast(kLn2), broadcast(pv_skip));
  return ((low | ~Lanes(g.valid)) & kAllLanes) == kAllLanes;
}

// Whether the shift must move to the new maximum before this block's exponentials.
inline bool needs_rescale(const GroupState& g, F32x16 block_max) {
  const F32x16 row_max = load(g.row_max), new_max = max(row_max, block_max);
  const Lanes first = ~less(broadcast(-INFINITY), row_max) & less(broadcast(-INFINITY), new_max);
  return ((less(load(g.shift) + broadcast(kRescaleStep), new_max) | first) & kAllLanes) != 0;
}

// Moves the shift to the new maximum and rescales row_sum; returns the factor for acc.
inline F32x16 move_shift(GroupState* g, F32x16 block_max) {
  const F32x16 row_max = load(g->row_max), new_max = max(row_max, block_max);
  const F32x16 old_shift = load(g->shift);
  const F32x16 shift = select(less(broadcast(-INFINITY), new_max), new_max, zero());
  // Before any maximum the sums are zero, and any finite factor will do.
  const F32x16 factor = exp2<6>(min(old_shift - shift, zero()));
  store(g->shift, shift);
  store(g->row_sum, load(g->row_sum) * factor);
  return factor;
}

constexpr int kMaxCodeP = 255;  // the largest code of 8-bit P

// P of keys from … to, as the words of product P; returns the row sum with P added. For 8-bit P
// `shift` is the block's own maximum, and the codes use the whole range 0 … kMaxCodeP.
template <Product P, int kDegree>
inline F32x16 exponentials(const float* s, int from, int to, F32x16 shift, float* words,
                           F32x16 sum) {
  int32_t* out = reinterpret_cast<int32_t*>(words);
  if constexpr (P == Product::f32) {
    for (int j = from; j < to; ++j) {
      const F32x16 p = exp2<kDegree>(load(s + j * kLanes) - shift);
      sum = sum + p;
      store(words + j * kLanes, p);
    }
  } else if constexpr (P == Product::bf16 || P == Product::tile_bf16) {
    for (int i = from / 2; i < to / 2; ++i) {
      const F32x16 a = exp2<kDegree>(load(s + 2 * i * kLanes) - shift);
      const F32x16 b = exp2<kDegree>(load(s + (2 * i + 1) * kLanes) - shift);
      sum = sum + (a + b);
      istore(out + i * kLanes, pair_bf16(a, b));
    }
  } else {
    for (int j = from; j < to; j += 4) {
      F32x16 p[4];
      for (int i = 0; i < 4; ++i)
        p[i] = exp2<kDegree, false, kMaxCodeP>(load(s + (j + i) * kLanes) - shift);
      sum = sum + ((p[0] + p[1]) + (p[2] + p[3]));
      if constexpr (P == Product::i16) {
        istore(out + j / 2 * kLanes, pair_i16(p[0], p[1]));
        istore(out + (j / 2 + 1) * kLanes, pair_i16(p[2], p[3]));
      } else {
        istore(out + j / 4 * kLanes, quad_u8(p[0], p[1], p[2], p[3]));
      }
    }
  }
  return sum;
}

// Multiplies acc, [width][16], by a factor per lane.
inline void rescale_rows(float* acc, int64_t width, F32x16 factor) {
  for (int64_t d = 0; d < width; ++d) store(acc + d * kLanes, load(acc + d * kLanes) * factor);
}

}  // namespace
}  // namespace sparge
