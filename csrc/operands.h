// Queries, keys and values as the words of a product.
#pragma once

#include "product.h"
#include "rows.h"

namespace sparge {
namespace {

// Whether fp32 numbers are rounded to bf16 on the way: the 16-bit precisions, where the product
// itself would not.
inline bool rounds_to_half(Precision p, Dtype dtype) {
  return dtype == Dtype::f32 && p != Precision::exact;
}

inline uint32_t word_at(const char* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// One row as `steps` words; zeros behind D.
template <Product P>
inline void pack_row(const Rows& x, const char* row, int64_t D, int steps, bool half,
                     uint32_t* out) {
  constexpr int per = per_word(P);
  constexpr bool bytes = P == Product::u8i8 || P == Product::tile_i8 || P == Product::tile_u8;
  const bool as_stored = x.stride_d == bytes_of(x.dtype) &&
                         (bytes || (per == 2 && P != Product::i16 && x.dtype == Dtype::bf16));
  if (as_stored) {
    const int whole = int(D / per);
    for (int s = 0; s < whole; ++s) out[s] = word_at(row + 4 * int64_t(s));
    for (int s = whole; s < steps; ++s) {
      uint32_t w = 0;
      const int64_t left = (D - int64_t(s) * per) * x.stride_d;
      if (left > 0) std::memcpy(&w, row + 4 * int64_t(s), size_t(left));
      out[s] = w;
    }
    return;
  }
  if constexpr (bytes || P == Product::i16) {
    if (P == Product::i16 && x.stride_d == 1 && D % kLanes == 0) {
      for (int64_t d = 0; d < D; d += kLanes)
        widen_i8(reinterpret_cast<const int8_t*>(row) + d, out + d / 2);
      return;
    }
    for (int s = 0; s < steps; ++s) {
      uint32_t w = 0;
      for (int i = 0; i < per; ++i) {
        const int64_t d = int64_t(s) * per + i;
        const int code = d < D ? int8_t(row[d * x.stride_d]) : 0;
        w |= (uint32_t(code) & (bytes ? 0xffu : 0xffffu)) << (32 / per * i);
      }
      out[s] = w;
    }
  } else {
    alignas(64) float numbers[kMaxDim + 32];
    read_row(x, row, D, numbers);
    if (half)
      for (int64_t d = 0; d < D; d += kLanes) store(numbers + d, half_of(load(numbers + d)));
    for (int64_t d = round_up(D, kLanes); d < int64_t(steps) * per && d < kMaxDim + 32; ++d)
      numbers[d] = 0.0f;
    for (int s = 0; s < steps; ++s) {
      if constexpr (P == Product::f32) {
        std::memcpy(out + s, numbers + s, 4);
      } else {
        out[s] = to_bf16(numbers[2 * s]) | uint32_t(to_bf16(numbers[2 * s + 1])) << 16;
      }
    }
  }
}

// B of the scores: 16 query rows, [steps][16] words. Lanes from `n` on are zero.
template <Product P>
inline void pack_queries(const Rows& x, const char* const* rows, int n, int64_t D, bool half,
                         float* out) {
  const int steps = steps_of(P, D);
  const int64_t width = round_up(steps, kLanes);
  alignas(64) float words[kLanes * (kMaxDim + kLanes)], turned[kLanes * kLanes];
  std::memset(words, 0, size_t(width) * kLanes * 4);
  for (int i = 0; i < n; ++i)
    pack_row<P>(x, rows[i], D, steps, half, reinterpret_cast<uint32_t*>(words + i * width));
  for (int s = 0; s < steps; s += kLanes) {
    transpose(words + s, width, turned, kLanes);
    const int rest = steps - s < kLanes ? steps - s : kLanes;
    std::memcpy(out + s * kLanes, turned, size_t(rest) * kLanes * 4);
  }
  // Queries are the unsigned side of a byte product: codes + 128, taken off again by code_sums.
  uint32_t* bits = reinterpret_cast<uint32_t*>(out);
  if (P == Product::u8i8)
    for (int s = 0; s < steps * kLanes; ++s) bits[s] ^= 0x80808080u;
}

// A of the scores: one key block, in panels; or for the tile unit as rows, in place where it lies
// as wanted. `scratch` has room for two blocks of words.
template <Product P>
inline Words key_words(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k, bool half,
                       char* scratch) {
  const int64_t first = i_k * kBlockK;
  const int64_t n = s.Lk - first < kBlockK ? s.Lk - first : kBlockK;
  const int steps = steps_of(P, s.D);
  const int64_t row_bytes = int64_t(steps) * 4;
  const bool same_type = P == Product::f32 ? x.dtype == Dtype::f32 && !half
                         : P == Product::bf16 || P == Product::tile_bf16 ? x.dtype == Dtype::bf16
                                                                         : P != Product::i16;
  const bool in_place = same_type && n == kBlockK && x.stride_d == bytes_of(x.dtype) &&
                        s.D * x.stride_d == row_bytes && x.stride_l % 4 == 0;
  const char* rows = x.row(b, h, first);
  int64_t apart = x.stride_l;
  if (!in_place || reinterpret_cast<uintptr_t>(rows) % 4) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
    for (int64_t j = 0; j < n; ++j)
      pack_row<P>(x, x.row(b, h, first + j), s.D, steps, half, words + j * steps);
    std::memset(words + n * steps, 0, size_t((kBlockK - n) * row_bytes));
    rows = scratch;
    apart = row_bytes;
  }
  if constexpr (is_tile(P)) return {rows, apart};
  char* panels = scratch + kBlockK * row_bytes;
  to_panels(reinterpret_cast<const float*>(rows), apart / 4, kBlockK, steps,
            reinterpret_cast<float*>(panels));
  return {panels, 0};
}

// A of the outputs for the vector products: one block of V, a row is a channel.
template <Product P>
inline Words value_words(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k,
                         bool half, float factor, char* scratch) {
  constexpr int per = per_word(P), steps = kBlockK / per;
  const int64_t first = i_k * kBlockK;
  const int64_t n = s.Lk - first < kBlockK ? s.Lk - first : kBlockK;
  const int64_t width = round_up(s.Dv, 2 * kLanes), apart = int64_t(steps) * kRowsAtOnce;
  const bool plain = x.stride_d == bytes_of(x.dtype);
  float* words = reinterpret_cast<float*>(scratch);
  alignas(64) float last[4][kLanes];
  for (int step = 0; step < steps; ++step)
    for (int64_t d = 0; d < width; d += kLanes) {
      F16 r[4];
      for (int i = 0; i < per; ++i) {
        const int64_t j = int64_t(step) * per + i;
        r[i] = zero();
        if (j >= n || d >= s.Dv) continue;
        const char* p = x.row(b, h, first + j) + d * x.stride_d;
        if (plain && d + kLanes <= s.Dv) {
          r[i] = read_lanes(p, x.dtype);
        } else {
          store(last[i], zero());
          for (int64_t c = 0; c < kLanes && d + c < s.Dv; ++c)
            last[i][c] = read_one(p + c * x.stride_d, x.dtype);
          r[i] = load(last[i]);
        }
        if (P == Product::f32 && half) r[i] = half_of(r[i]);
        if (P == Product::f32 || P == Product::bf16) r[i] = r[i] * all(factor);
        // Signed bytes as the unsigned numbers that have their bits.
        if (per == 4) r[i] = select(less(r[i], zero()), r[i] + all(256.0f), r[i]);
      }
      I16 word;
      if constexpr (P == Product::f32)
        word = as_words(r[0]);
      else if constexpr (P == Product::bf16)
        word = pair_bf16(r[0], r[1]);
      else if constexpr (P == Product::i16)
        word = pair_i16(r[0], r[1]);
      else
        word = quad_u8(r[0], r[1], r[2], r[3]);
      store_panels(words + d / kRowsAtOnce * apart + step * kRowsAtOnce, apart, word);
    }
  return {scratch, 0};
}

}  // namespace
}  // namespace sparge
