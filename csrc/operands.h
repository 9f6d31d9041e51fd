// Queries, keys and values as the words of a product.
#pragma once

#include <type_traits>

#include "product.h"
#include "read_rows.h"

namespace sparge {
namespace {

// Whether fp32 numbers are rounded to bf16 when packed, as every precision but `exact` does.
inline bool rounds_to_half(Precision p, Dtype dtype) {
  return dtype == Dtype::f32 && p != Precision::exact;
}

inline uint32_t word_at(const char* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// One row as `steps` words; zeros after D.
template <Product P>
inline void pack_row(const Rows& x, const char* row, int64_t D, int steps, bool half,
                     uint32_t* out) {
  constexpr int per = per_word(P);
  constexpr bool bytes = P == Product::u8i8 || P == Product::tile_i8 || P == Product::tile_u8;
  const bool as_stored =
      has_dense_rows(x) && (bytes || (per == 2 && P != Product::i16 && x.dtype == Dtype::bf16));
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
  alignas(64) float words[kLanes * (kMaxDim + kLanes)], transposed[kLanes * kLanes];
  std::memset(words, 0, size_t(width) * kLanes * 4);
  for (int i = 0; i < n; ++i)
    pack_row<P>(x, rows[i], D, steps, half, reinterpret_cast<uint32_t*>(words + i * width));
  for (int s = 0; s < steps; s += kLanes) {
    transpose(words + s, width, transposed, kLanes);
    const int rest = steps - s < kLanes ? steps - s : kLanes;
    std::memcpy(out + s * kLanes, transposed, size_t(rest) * kLanes * 4);
  }
  // Queries are the unsigned operand of a byte product: codes + 128. code_sums correct for it.
  uint32_t* bits = reinterpret_cast<uint32_t*>(out);
  if (P == Product::u8i8)
    for (int s = 0; s < steps * kLanes; ++s) bits[s] ^= 0x80808080u;
}

// Whether the rows of a key block are the words of a product as they lie in memory.
template <Product P>
inline bool keys_in_place(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k,
                          bool half) {
  const bool same_type = P == Product::f32 ? x.dtype == Dtype::f32 && !half
                         : P == Product::bf16 || P == Product::tile_bf16 ? x.dtype == Dtype::bf16
                                                                         : P != Product::i16;
  return same_type && (i_k + 1) * kBlockK <= s.Lk && has_dense_rows(x) &&
         s.D * x.stride_d == int64_t(steps_of(P, s.D)) * 4 && x.stride_l % 4 == 0 &&
         reinterpret_cast<uintptr_t>(x.row(b, h, i_k * kBlockK)) % 4 == 0;
}

// A of the scores: one key block, in panels; or as rows for the tile unit, in place if possible.
// `scratch` has room for two blocks of words.
template <Product P>
inline Words key_words(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k, bool half,
                       char* scratch) {
  const int64_t first = i_k * kBlockK;
  const int64_t n = s.Lk - first < kBlockK ? s.Lk - first : kBlockK;
  const int steps = steps_of(P, s.D);
  const int64_t row_bytes = int64_t(steps) * 4;
  const char* rows = x.row(b, h, first);
  int64_t pitch = x.stride_l;
  if (!keys_in_place<P>(x, s, b, h, i_k, half)) {
    uint32_t* words = reinterpret_cast<uint32_t*>(scratch);
    for (int64_t j = 0; j < n; ++j)
      pack_row<P>(x, x.row(b, h, first + j), s.D, steps, half, words + j * steps);
    std::memset(words + n * steps, 0, size_t((kBlockK - n) * row_bytes));
    rows = scratch;
    pitch = row_bytes;
  }
  if constexpr (is_tile(P)) return {rows, pitch};
  char* panels = scratch + kBlockK * row_bytes;
  to_panels(reinterpret_cast<const float*>(rows), pitch / 4, kBlockK, steps,
            reinterpret_cast<float*>(panels));
  return panels_of(panels, steps);
}

// 16 numbers of a row from channel d on; zeros after Dv.
template <Dtype kType>
inline F32x16 value_lanes(const Rows& x, const char* row, int64_t d, int64_t Dv) {
  const char* p = row + d * x.stride_d;
  if (x.stride_d == bytes_of(kType) && d + kLanes <= Dv) return read_lanes<kType>(p);
  alignas(64) float lanes[kLanes] = {};
  for (int64_t c = 0; c < kLanes && d + c < Dv; ++c) lanes[c] = read_one(p + c * x.stride_d, kType);
  return load(lanes);
}

// Bytes between panels of V: one cache line more than a panel holds. Otherwise writing a row of V,
// a piece to each panel, would map to few sets of the cache.
constexpr int64_t value_panel_bytes(Product p) {
  return int64_t(kBlockK / per_word(p)) * kRowsAtOnce * 4 + 64;
}

// A of the outputs for the vector products: one block of V, a row is a channel. fp32 products take
// fp32 values unrounded: rounding to 16 bits would cost time and precision.
template <Product P, Dtype kType>
inline void value_panels(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k,
                         float factor, float* words) {
  constexpr int per = per_word(P), steps = kBlockK / per;
  const int64_t first = i_k * kBlockK;
  const int64_t n = s.Lk - first < kBlockK ? s.Lk - first : kBlockK;
  const int64_t width = round_up(s.Dv, 2 * kLanes), pitch = value_panel_bytes(P) / 4;
  const F32x16 f = broadcast(factor);
  for (int step = 0; step < steps; ++step) {
    const char* rows[per];
    for (int i = 0; i < per; ++i) {
      const int64_t j = int64_t(step) * per + i;
      rows[i] = j < n ? x.row(b, h, first + j) : nullptr;
    }
    for (int64_t d = 0; d < width; d += kLanes) {
      F32x16 r[per];
      for (int i = 0; i < per; ++i) {
        r[i] = rows[i] && d < s.Dv ? value_lanes<kType>(x, rows[i], d, s.Dv) : zero();
        if constexpr (!is_integer(P)) r[i] = r[i] * f;
        // Signed bytes as unsigned numbers with the same bits.
        if constexpr (per == 4) r[i] = select(less(r[i], zero()), r[i] + broadcast(256.0f), r[i]);
      }
      I32x16 word;
      if constexpr (P == Product::f32)
        word = as_words(r[0]);
      else if constexpr (P == Product::bf16)
        word = pair_bf16(r[0], r[1]);
      else if constexpr (P == Product::i16)
        word = pair_i16(r[0], r[1]);
      else
        word = quad_u8(r[0], r[1], r[2], r[3]);
      store_panels(words + d / kRowsAtOnce * pitch + step * kRowsAtOnce, pitch, word);
    }
  }
}
// The same for values that already have the dtype of the product: only rearranged.
template <class T>
inline void value_panels_as_stored(const char* rows, int64_t row_pitch, int64_t width,
                                   int64_t pitch, float* words) {
  constexpr int per = int(4 / sizeof(T)), bits = 32 / per;
  for (int step = 0; step < kBlockK / per; ++step, rows += per * row_pitch)
    for (int64_t d = 0; d < width; d += kLanes) {
      T r[per][kLanes];
      uint32_t word[kLanes];
      for (int i = 0; i < per; ++i)
        std::memcpy(r[i], rows + i * row_pitch + d * int64_t(sizeof(T)), sizeof(r[i]));
      for (int c = 0; c < kLanes; ++c) {
        word[c] = r[0][c];
        for (int i = 1; i < per; ++i) word[c] |= uint32_t(r[i][c]) << (bits * i);
      }
      std::memcpy(words + d / kRowsAtOnce * pitch + step * kRowsAtOnce, word, sizeof(word));
    }
}
// 8-bit codes as pairs of 16 bits.
inline void value_panels_of_codes(const char* rows, int64_t row_pitch, int64_t width, int64_t pitch,
                                  float* words) {
  for (int step = 0; step < kBlockK / 2; ++step, rows += 2 * row_pitch)
    for (int64_t d = 0; d < width; d += kLanes)
      store_panels(words + d / kRowsAtOnce * pitch + step * kRowsAtOnce, pitch,
                   pair_codes(reinterpret_cast<const int8_t*>(rows) + d,
                              reinterpret_cast<const int8_t*>(rows + row_pitch) + d));
}
template <Product P>
inline Words value_words(const Rows& x, const Shape& s, int64_t b, int64_t h, int64_t i_k,
                         float factor, char* scratch) {
  float* words = reinterpret_cast<float*>(scratch);
  const bool whole = (i_k + 1) * kBlockK <= s.Lk && s.Dv % (2 * kLanes) == 0;
  if constexpr (P == Product::i16) {
    if (whole && x.stride_d == 1) {
      const char* rows = x.row(b, h, i_k * kBlockK);
      value_panels_of_codes(rows, x.stride_l, s.Dv, value_panel_bytes(P) / 4, words);
      return {scratch, value_panel_bytes(P)};
    }
  }
  if constexpr (P == Product::bf16 || P == Product::u8i8) {
    const bool same_type = P == Product::u8i8 || (x.dtype == Dtype::bf16 && factor == 1.0f);
    if (whole && same_type && has_dense_rows(x)) {
      using T = std::conditional_t<P == Product::bf16, uint16_t, uint8_t>;
      value_panels_as_stored<T>(x.row(b, h, i_k * kBlockK), x.stride_l, s.Dv,
                                value_panel_bytes(P) / 4, words);
      return {scratch, value_panel_bytes(P)};
    }
  }
  if constexpr (is_integer(P))
    value_panels<P, Dtype::i8>(x, s, b, h, i_k, factor, words);
  else if (x.dtype == Dtype::f32)
    value_panels<P, Dtype::f32>(x, s, b, h, i_k, factor, words);
  else if (x.dtype == Dtype::bf16)
    value_panels<P, Dtype::bf16>(x, s, b, h, i_k, factor, words);
  else
    value_panels<P, Dtype::f16>(x, s, b, h, i_k, factor, words);
  return {scratch, value_panel_bytes(P)};
}

}  // namespace
}  // namespace sparge
