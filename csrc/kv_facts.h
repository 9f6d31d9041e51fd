// Facts about K and V that attend needs before it starts, one key block at a time: whether all of
// it is finite, the largest |v|, sums of key codes; and V transposed for the tile unit.
#pragma once

#include "operands.h"
#include "statistics.h"
#include "tile_product.h"

namespace sparge {
namespace {

constexpr Product kScoresInt8 = kTiles      ? Product::tile_i8
                                : kHasBytes ? Product::u8i8
                                            : Product::i16;
constexpr Product kScoresHalf = kTiles      ? Product::tile_bf16
                                : kHasPairs ? Product::bf16
                                            : Product::f32;
constexpr Product kOutHalf = kScoresHalf;
constexpr Product kOutFast = kTiles ? Product::tile_u8 : kHasBytes ? Product::u8i8 : Product::i16;

// fp16 is computed in fp32: bf16 products would lose three bits.
inline bool half_in_f32(const AttendArgs& a) {
  return a.precision == Precision::half && a.value.dtype == Dtype::f16;
}

bool needs_code_sums(const AttendArgs& a) {
  return kScoresInt8 == Product::u8i8 && a.key.dtype == Dtype::i8;
}

// Bytes of one key block of transposed V; 0 where V is read in place.
int64_t v_tile_bytes(const AttendArgs& a) {
  if (!kTiles || a.precision == Precision::exact || half_in_f32(a)) return 0;
  const int64_t width = round_up(a.shape.Dv, 2 * kLanes);
  return width * kBlockK * (a.precision == Precision::int8_fast ? 1 : 2);
}

void find_kv_facts(const AttendArgs& a, int64_t task, uint8_t* finite, float* largest,
                   int32_t* code_sums) {
  const Shape& s = a.shape;
  const int64_t n = s.n_k(), bh = task / n, b = bh / s.Hk, h = bh % s.Hk,
                start = task % n * kBlockK;
  const int64_t stop = start + kBlockK < s.Lk ? start + kBlockK : s.Lk;
  alignas(64) float row[kMaxDim];
  bool ok = true;
  float most = 0.0f;
  for (int64_t l = start; l < stop; ++l) {
    if (a.key.dtype == Dtype::i8) {
      ok &= std::fabs(a.k_scale.head(bh)[l]) < INFINITY;
    } else {
      read_row(a.key, a.key.row(b, h, l), s.D, row);
      ok &= largest_of(row, round_up(s.D, kLanes)) < INFINITY;
    }
    if (!a.v_scale) {
      read_row(a.value, a.value.row(b, h, l), s.Dv, row);
      const float x = largest_of(row, round_up(s.Dv, kLanes));
      if (x < INFINITY)
        most = x > most ? x : most;
      else
        ok = false;
    }
    if (code_sums) code_sums[bh * s.Lk + l] = sum_of_codes(a.key, a.key.row(b, h, l), s.D);
  }
  if (a.v_scale)
    for (int64_t d = 0; d < s.Dv; ++d) {
      // A little above 127 scales, for rounding.
      const float scale = a.v_scale[task * s.Dv + d];
      const double x = double(scale) * 127.0001;
      if (!(scale < INFINITY))
        ok = false;
      else if (x > double(most))
        most = x < 3.4028234663852886e38 ? float(x) : 3.4028234663852886e38f;
    }
  finite[task] = ok;
  largest[task] = most;
}

// [width][64 keys] of one block, bf16 or codes.
void transpose_value(const AttendArgs& a, int64_t task, char* v_tiles) {
  if constexpr (kTiles) {
    const Shape& s = a.shape;
    const int64_t n = s.n_k(), bh = task / n, b = bh / s.Hk, h = bh % s.Hk;
    const int64_t start = task % n * kBlockK, width = round_up(s.Dv, 2 * kLanes);
    const int64_t stop = start + kBlockK < s.Lk ? start + kBlockK : s.Lk;
    const bool bytes = a.precision == Precision::int8_fast;
    const int per = bytes ? 4 : 2;
    const bool half = rounds_to_half(a.precision, a.value.dtype);
    const F32x16 factor = broadcast(a.v_factor[bh]);
    char* out = v_tiles + task * a.v_tiles_block;
    alignas(64) float rows[4][kMaxDim];
    alignas(64) int32_t words[kLanes * kMaxDim];
    // 16 words of keys at a time: interleave the rows of a word, then transpose 16 x 16.
    for (int64_t first = 0; first < kBlockK; first += kLanes * per) {
      for (int w = 0; w < kLanes; ++w) {
        for (int i = 0; i < per; ++i) {
          const int64_t l = start + first + w * per + i;
          std::memset(rows[i], 0, size_t(width) * 4);
          if (l < stop) read_row(a.value, a.value.row(b, h, l), s.Dv, rows[i]);
        }
        for (int64_t d = 0; d < width; d += kLanes) {
          F32x16 r[4];
          for (int i = 0; i < per; ++i) {
            r[i] = load(rows[i] + d);
            if (bytes)
              r[i] = select(less(r[i], zero()), r[i] + broadcast(256.0f), r[i]);
            else
              r[i] = (half ? half_of(r[i]) : r[i]) * factor;
          }
          istore(words + w * kMaxDim + d,
                 bytes ? quad_u8(r[0], r[1], r[2], r[3]) : pair_bf16(r[0], r[1]));
        }
      }
      const int64_t row_words = kBlockK / per;
      for (int64_t d = 0; d < width; d += kLanes)
        transpose(reinterpret_cast<const float*>(words) + d, kMaxDim,
                  reinterpret_cast<float*>(out) + d * row_words + first / per, row_words);
    }
  }
}

}  // namespace
}  // namespace sparge
