// Exact scores of up to 16 rows of one head, one key block at a time: a row is a lane, and rows may
// belong to different query blocks. Base 2, -inf where masked.
#pragma once

#include "kv_facts.h"
#include "softmax.h"

namespace sparge {
namespace {

// One key block as words of the product, and the sums of its codes where the product needs them.
struct KeyBlock {
  Words words;
  bool in_place;  // rows instead of panels
  int32_t code_sums[kBlockK];
};

template <Product P>
struct RowScores {
  const ScoreArgs* a = nullptr;
  int64_t b, h, h_k;
  const int64_t* row_of;
  int n, steps;
  int64_t first_block, last_block;  // of the rows, which need not ascend
  float *queries, *scores;          // scores: [64][16], and as much again for the tile unit
  alignas(64) float factor[kLanes];
  alignas(64) float scales[kBlockK];
  GroupMask mask;

  // Floats and bytes of the scratch.
  static size_t query_floats(const Shape& s) { return size_t(round_up(s.D, 64)) * kLanes * 2; }
  static size_t key_bytes(const Shape& s) { return size_t(round_up(s.D, 64)) * kBlockK * 4 * 2; }
  static constexpr size_t kScoreFloats = size_t(2) * kBlockK * kLanes;

  void begin(const ScoreArgs& args, int64_t b_, int64_t h_, const int64_t* rows, int n_rows,
             float* query_room, float* score_room) {
    a = &args, b = b_, h = h_, h_k = h / args.shape.group();
    row_of = rows, n = n_rows, steps = steps_of(P, args.shape.D);
    queries = query_room, scores = score_room;
    first_block = last_block = row_of[0] / kBlockQ;
    const char* at[kLanes];
    std::memset(factor, 0, sizeof(factor));
    for (int i = 0; i < n; ++i) {
      at[i] = args.query.row(b, h, row_of[i]);
      const int64_t block = row_of[i] / kBlockQ;
      first_block = block < first_block ? block : first_block;
      last_block = block > last_block ? block : last_block;
      factor[i] = float(args.softmax_scale * 1.4426950408889634);
      if (args.q_scale.data)
        factor[i] = args.q_scale.head(b * args.shape.Hq + h)[row_of[i]] * factor[i];
    }
    const bool half = rounds_to_half(args.precision, args.query.dtype);
    pack_queries<P>(args.query, at, n, args.shape.D, half, queries);
    if constexpr (is_tile(P)) std::memset(queries + steps * kLanes, 0, size_t(steps) * kLanes * 4);
  }

  // The kind of one key block for all rows together.
  Kind kind(int64_t i_k) const {
    if (!a->tokens.kinds) {
      // Under the diagonal alone, later query blocks attend what earlier ones do.
      const Kind most = a->tokens.kind(a->shape, b, h, last_block, i_k);
      if (most == kExcluded) return kExcluded;
      return a->tokens.kind(a->shape, b, h, first_block, i_k) == kOpen ? kOpen : kMixed;
    }
    int least = kOpen;
    bool some = false;
    for (int i = 0; i < n; ++i) {
      const Kind k = a->tokens.kind(a->shape, b, h, row_of[i] / kBlockQ, i_k);
      some |= k != kExcluded;
      least = k < least ? int(k) : least;
    }
    return !some ? kExcluded : least == kOpen ? kOpen : kMixed;
  }

  // One key block; several groups of rows can share it.
  KeyBlock key(int64_t i_k, char* room) const {
    const Shape& s = a->shape;
    const bool half = rounds_to_half(a->precision, a->key.dtype);
    KeyBlock block;
    block.in_place = !is_tile(P) && has_product_rows(steps) && a->key.stride_l == steps * 4 &&
                     keys_in_place<P>(a->key, s, b, h_k, i_k, half);
    block.words = block.in_place ? Words{a->key.row(b, h_k, i_k * kBlockK), 0}
                                 : key_words<P>(a->key, s, b, h_k, i_k, half, room);
    if constexpr (P == Product::u8i8) {
      const int64_t held = s.Lk - i_k * kBlockK < kBlockK ? s.Lk - i_k * kBlockK : kBlockK;
      for (int64_t j = 0; j < kBlockK; ++j)
        block.code_sums[j] =
            j < held ? sum_of_codes(a->key, a->key.row(b, h_k, i_k * kBlockK + j), s.D) : 0;
    }
    return block;
  }

  // Scores of one key block that is not excluded; returns each row's maximum.
  F32x16 score(const KeyBlock& key, int64_t i_k, Kind kind) {
    const Shape& s = a->shape;
    const bool whole = (i_k + 1) * kBlockK <= s.Lk, masked = kind != kOpen || !whole;
    if (masked) mask_group(a->tokens, s, b, h, row_of, n, i_k, &mask);
    multiply(key);
    const float* k_scale = nullptr;
    if (a->k_scale.data && whole) {
      k_scale = a->k_scale.head(b * s.Hk + h_k) + i_k * kBlockK;
    } else if (a->k_scale.data) {
      for (int64_t i = 0; i < kBlockK; ++i) {
        const int64_t l = i_k * kBlockK + i < s.Lk ? i_k * kBlockK + i : s.Lk - 1;
        scales[i] = a->k_scale.head(b * s.Hk + h_k)[l];
      }
      k_scale = scales;
    }
    return scale_scores<is_integer(P)>(scores, 0, kBlockK, k_scale, load(factor),
                                       masked ? &mask : nullptr, kLog2e, broadcast(-INFINITY));
  }

  void multiply(const KeyBlock& key) {
    if constexpr (is_tile(P)) {
      for (int quarter = 0; quarter < 4; ++quarter)
        tile_scores<P>(key.words, quarter, queries, steps, scores, scores + kBlockK * kLanes);
    } else {
      // The queries of a byte product are codes + 128.
      constexpr bool add = P == Product::u8i8;
      if (add)
        for (int j = 0; j < kBlockK; ++j) {
          int32_t offset[kLanes];
          for (int i = 0; i < kLanes; ++i) offset[i] = -128 * key.code_sums[j];
          std::memcpy(scores + j * kLanes, offset, sizeof(offset));
        }
      if (key.in_place)
        product_in_place<P>(key.words.data, kBlockK, queries, steps, scores, add);
      else
        product<P>(key.words, kBlockK, queries, steps, scores, add);
    }
  }
};

// Calls f with the product that scores rows in the precision of the call.
template <class F>
inline void with_row_product(const ScoreArgs& a, F f) {
  if (a.key.dtype == Dtype::i8)
    f(std::integral_constant<Product, kScoresInt8>());
  else if (a.precision == Precision::exact || a.key.dtype == Dtype::f16)
    f(std::integral_constant<Product, Product::f32>());
  else
    f(std::integral_constant<Product, kScoresHalf>());
}

}  // namespace
}  // namespace sparge
