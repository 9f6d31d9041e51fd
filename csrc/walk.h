// The steps of attention of one query block over its kept key blocks; attend.h schedules them.
//
// The block's 128 queries are 8 row groups of 16 lanes, processed in units: one group, or two with
// the tile unit. Key blocks are processed in chunks: one block, or four with the tile unit, whose
// accumulators are loaded and stored once per chunk.
// Pooled entries of skipped blocks come last (pooled_entries.h).
#pragma once

#include "arena.h"
#include "operands.h"
#include "pooled_entries.h"
#include "softmax.h"
#include "statistics.h"
#include "tile_product.h"

namespace sparge {
namespace {

template <Product QK, Product PV, int kDegree>
struct Walk {
  static constexpr bool kTile = is_tile(QK);
  static constexpr int kUnit = kTile ? 2 : 1;
  static constexpr int kChunk = kTile ? 4 : 1;
  static constexpr bool kFast = is_integer(PV);  // 8-bit P and V
  static constexpr int kPSteps = kBlockK / per_word(PV);

  const AttendArgs& a;
  const Shape& shape;
  int64_t b, h, h_k, i_q, n_rows, width;
  int n_groups, n_units, q_steps;
  // In the thread's scratch.
  GroupState* groups;
  float *queries, *acc, *scores, *weights, *sums;
  char *k_scratch, *v_scratch;
  GroupMask* masks;   // [2][kUnit]
  uint8_t* pools;     // [n_k] whether a block is pooled: skipped, and open to every row
  int32_t* visited;   // kept blocks, then tiles of pooled entries
  float* entry_bias;  // [kChunk][64] of pooled entries
  size_t scratch_bytes;

  struct Slot {
    const AttendArgs* from;  // where its keys and values are: the caller's, or pooled entries
    int64_t i_k;             // which 64 of them
    Words key, value;
    const char* v_tile;
    bool masked, pooled;
  } slots[kChunk];
  int n_slots = 0;
  alignas(64) float p_scale[2][kChunk][kUnit][kLanes];
  alignas(64) float block_max[2][kUnit][kLanes];
  alignas(64) float k_scales[kBlockK];
  int32_t skips_counted = 0;

  Walk(const AttendArgs& args, int64_t task, char* scratch) : a(args), shape(args.shape) {
    i_q = task % shape.n_q();
    h = task / shape.n_q() % shape.Hq;
    b = task / shape.n_q() / shape.Hq;
    h_k = h / shape.group();
    n_rows = shape.Lq - i_q * kBlockQ < kBlockQ ? shape.Lq - i_q * kBlockQ : kBlockQ;
    n_groups = int((n_rows + kLanes - 1) / kLanes);
    n_units = (n_groups + kUnit - 1) / kUnit;
    width = round_up(shape.Dv, 2 * kLanes);
    q_steps = steps_of(QK, shape.D);
    Arena arena{scratch};
    const size_t w = size_t(width), steps = size_t(q_steps);
    groups = arena.take<GroupState>(kGroups);
    queries = arena.take<float>(kGroups * steps * kLanes);
    acc = arena.take<float>(kGroups * w * kLanes);
    scores = arena.take<float>(2 * kUnit * kBlockK * kLanes);
    weights = arena.take<float>(2 * kChunk * kUnit * kPSteps * kLanes);
    sums = arena.take<float>(kFast ? kUnit * w * kLanes : 0);
    k_scratch = arena.take<char>(kChunk * 2 * kBlockK * steps * 4);
    v_scratch = arena.take<char>(is_tile(PV) ? 0 : w / kRowsAtOnce * size_t(value_panel_bytes(PV)));
    masks = arena.take<GroupMask>(2 * kUnit);
    const size_t n_k = a.pooled ? size_t(shape.n_k()) : 0;
    pools = arena.take<uint8_t>(n_k);
    visited = arena.take<int32_t>(a.pooled ? n_k + size_t(a.pooled->shape.n_k()) : 0);
    entry_bias = arena.take<float>(a.pooled ? kChunk * kBlockK : 0);
    scratch_bytes = arena.used;
  }

  int64_t key_head() const { return b * shape.Hk + h_k; }
  int64_t query_head() const { return b * shape.Hq + h; }
  float* acc_of(int g) { return acc + int64_t(g) * width * kLanes; }
  float* scores_of(int parity, int u) { return scores + (parity * kUnit + u) * kBlockK * kLanes; }
  float* weights_of(int parity, int slot, int u) {
    return weights + ((parity * kChunk + slot) * kUnit + u) * kPSteps * kLanes;
  }

  void begin() {
    const float factor = float(a.softmax_scale * 1.4426950408889634);
    for (int g = 0; g < n_units * kUnit; ++g) {
      const char* rows[kLanes];
      GroupState& state = groups[g];
      state.valid = state.may = 0;
      int n = 0;
      for (int i = 0; i < kLanes; ++i) {
        const int64_t row = i_q * kBlockQ + g * kLanes + i;
        state.row_max[i] = -INFINITY;
        state.shift[i] = state.row_sum[i] = 0.0f;
        state.q_factor[i] = factor;
        if (row >= shape.Lq) continue;
        rows[n++] = a.query.row(b, h, row);
        state.valid |= uint16_t(1 << i);
        if (a.q_scale.data) {
          state.q_factor[i] = a.q_scale.head(query_head())[row] * factor;
        } else {
          // A query that is not finite makes its row NaN, even if it attends nothing.
          alignas(64) float numbers[kMaxDim];
          read_row(a.query, rows[n - 1], shape.D, numbers);
          if (!(largest_of(numbers, round_up(shape.D, kLanes)) < INFINITY)) state.q_factor[i] = NAN;
        }
      }
      pack_queries<QK>(a.query, rows, n, shape.D, rounds_to_half(a.precision, a.query.dtype),
                       queries + int64_t(g) * q_steps * kLanes);
      std::memset(acc_of(g), 0, size_t(width) * kLanes * 4);
    }
  }

  // Where entry `index` of the visited list is, and which 64 there.
  const AttendArgs& source(int64_t index, int64_t* i_k) const {
    const bool pooled = index >= shape.n_k();
    *i_k = pooled ? index - shape.n_k() : index;
    return pooled ? *a.pooled : a;
  }

  void take_chunk(const int32_t* kept, int n) {
    n_slots = n;
    for (int i = 0; i < n; ++i) {
      Slot& slot = slots[i];
      slot.from = &source(kept[i], &slot.i_k);
      slot.pooled = slot.from != &a;
      const AttendArgs& from = *slot.from;
      if (slot.pooled) find_entry_bias(a, pools, slot.i_k, entry_bias + i * kBlockK);
      const bool tail = (slot.i_k + 1) * kBlockK > shape.Lk;
      slot.masked = !slot.pooled && (tail || a.tokens.kind(shape, b, h, i_q, slot.i_k) != kOpen);
      slot.key = key_words<QK>(from.key, from.shape, b, h_k, slot.i_k,
                               rounds_to_half(a.precision, from.key.dtype),
                               k_scratch + int64_t(i) * 2 * kBlockK * q_steps * 4);
      if constexpr (is_tile(PV))
        slot.v_tile = v_tile_of(from, slot.i_k);
      else
        slot.value = value_words<PV>(from.value, from.shape, b, h_k, slot.i_k,
                                     a.v_factor[key_head()], v_scratch);
    }
  }
  const char* v_tile_of(const AttendArgs& from, int64_t i_k) const {
    return from.v_tiles + (key_head() * from.shape.n_k() + i_k) * from.v_tiles_block;
  }

  // Prefetches one part of a later block. Kept blocks are not adjacent, so that hardware does not
  // prefetch them. Into the second-level cache: the first is full of what is being used.
  void fetch(int64_t index, int part, int parts) const {
    int64_t i_k;
    const AttendArgs& from = source(index, &i_k);
    const int64_t n = kBlockK / parts, first = i_k * kBlockK + part * n;
    for (int64_t l = first; l < first + n && l < from.shape.Lk; ++l) {
      fetch_bytes(from.key.row(b, h_k, l), row_bytes(from.key, shape.D));
      if (!is_tile(PV)) fetch_bytes(from.value.row(b, h_k, l), row_bytes(from.value, shape.Dv));
    }
    if constexpr (is_tile(PV)) {
      const int64_t bytes = from.v_tiles_block / parts;
      fetch_bytes(v_tile_of(from, i_k) + part * bytes, bytes);
    }
  }
  // Rows that are not dense would be too many cache lines.
  static int64_t row_bytes(const Rows& x, int64_t n) {
    return has_dense_rows(x) ? n * x.stride_d : 0;
  }
  static void fetch_bytes(const char* p, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
    // gcc assumes that prefetching has no effect, and without this line drops every call of
    // `fetch`.
    __asm__ volatile("");
  }

  const float* scales_of(const Slot& slot, float* room) const {
    const Scales& scales = slot.from->k_scale;
    if (!scales.data) return nullptr;
    const int64_t first = slot.i_k * kBlockK, L = slot.from->shape.Lk;
    if (first + kBlockK <= L) return scales.head(key_head()) + first;
    for (int64_t j = 0; j < kBlockK; ++j)
      room[j] = scales.head(key_head())[first + j < L ? first + j : L - 1];
    return room;
  }

  // The masks of a step, needed before its scores are scaled. False if no row of the unit may
  // attend.
  bool mask_step(int unit, const Slot& slot, int parity) {
    if (!slot.masked) {
      for (int u = 0; u < kUnit; ++u) groups[unit * kUnit + u].may = kAllLanes;
      return true;
    }
    uint16_t any = 0;
    for (int u = 0; u < kUnit; ++u) {
      GroupState& g = groups[unit * kUnit + u];
      int64_t rows[kLanes];
      int n = 0;
      for (int i = 0; i < kLanes; ++i)
        if (g.valid >> i & 1) rows[n++] = i_q * kBlockQ + (unit * kUnit + u) * kLanes + i;
      mask_group(a.tokens, shape, b, h, rows, n, slot.i_k, &masks[parity * kUnit + u]);
      g.may |= masks[parity * kUnit + u].any;
      any |= masks[parity * kUnit + u].any;
    }
    return any != 0;
  }

  // Products of 16 keys with a unit's queries.
  void multiply(int unit, const Slot& slot, int parity, int quarter) {
    const float* q = queries + int64_t(unit) * kUnit * q_steps * kLanes;
    if constexpr (kTile) {
      tile_scores<QK>(slot.key, quarter, q, q_steps, scores_of(parity, 0), scores_of(parity, 1));
    } else {
      const Words key{slot.key.data + quarter * (16 / kRowsAtOnce) * slot.key.pitch,
                      slot.key.pitch};
      float* c = scores_of(parity, 0) + quarter * 16 * kLanes;
      if constexpr (QK == Product::u8i8) {
        const int64_t L = slot.from->shape.Lk;
        const int32_t* sums = slot.from->code_sums + key_head() * L;
        for (int j = 0; j < 16; ++j) {
          const int64_t l = slot.i_k * kBlockK + quarter * 16 + j;
          const int32_t offset = l < L ? -128 * sums[l] : 0;
          for (int i = 0; i < kLanes; ++i) std::memcpy(c + j * kLanes + i, &offset, 4);
        }
      }
      product<QK>(key, 16, q, q_steps, c, QK == Product::u8i8);
    }
  }

  // Turns products into scores; block_max receives their maximum.
  void scale(int unit, const Slot& slot, int parity, int quarter, const float* k_scale) {
    for (int u = 0; u < kUnit; ++u) {
      const F32x16 before = quarter ? load(block_max[parity][u]) : broadcast(-INFINITY);
      const GroupMask* mask = slot.masked ? &masks[parity * kUnit + u] : nullptr;
      const F32x16 q_factor = load(groups[unit * kUnit + u].q_factor);
      float* s = scores_of(parity, u);
      const int from = quarter * 16, to = from + 16;
      store(
          block_max[parity][u],
          slot.pooled
              ? scale_entries<is_integer(QK)>(s, from, to, k_scale, q_factor,
                                              entry_bias + (&slot - slots) * kBlockK, before)
              : scale_scores<is_integer(QK)>(s, from, to, k_scale, q_factor, mask, kLog2e, before));
    }
  }

  // Applies the second filter, but not to pooled entries, and moves the shift where needed. Returns
  // the groups that continue, as bits. `before_rescale(unit)` accumulates what was computed with
  // the old shift.
  template <class F>
  unsigned decide(int unit, const Slot& slot, int parity, bool attends, F before_rescale) {
    const float pv_skip = a.pv_skip && !slot.pooled ? a.pv_skip[h] : INFINITY;
    unsigned active = 0;
    for (int u = 0; u < kUnit; ++u) {
      const int i = unit * kUnit + u;
      if (i >= n_groups) continue;
      GroupState& g = groups[i];
      const F32x16 most = attends ? load(block_max[parity][u]) : broadcast(-INFINITY);
      if (skips(g, most, pv_skip)) {
        ++skips_counted;
      } else if (attends) {
        active |= 1u << u;
        if (needs_rescale(g, most)) {
          before_rescale(unit);
          rescale_rows(acc_of(i), width, move_shift(&g, most));
        }
      }
      store(g.row_max, max_or_nan(load(g.row_max), most));
    }
    return active;
  }

  // Exponentials of one group and a range of keys into the words of P.
  void exponentiate(int unit, int u, int parity, int p_parity, int slot, int from, int to) {
    GroupState& g = groups[unit * kUnit + u];
    F32x16 shift = load(g.shift);
    F32x16 sum = kFast && from == 0 ? zero()
                 : kFast            ? load(p_scale[p_parity][slot][u])
                                    : load(g.row_sum);
    if constexpr (kFast) {
      const F32x16 most = load(block_max[parity][u]);
      shift = select(less(broadcast(-INFINITY), most), most, zero());
    }
    sum = exponentials<PV, kDegree>(scores_of(parity, u), from, to, shift,
                                    weights_of(p_parity, slot, u), sum);
    if constexpr (kFast) {
      store(p_scale[p_parity][slot][u], sum);
      if (to < kBlockK) return;
      // The value of one code, relative to the row's shift.
      const F32x16 most = load(block_max[parity][u]);
      const Lanes some = less(broadcast(-INFINITY), most);
      const F32x16 weight =
          select(some, exp2<6>(most - load(g.shift)) * broadcast(1.0f / float(kMaxCodeP)), zero());
      store(g.row_sum, fma(sum, weight, load(g.row_sum)));
      store(p_scale[p_parity][slot][u], weight);
    } else {
      store(g.row_sum, sum);
    }
  }

  // Adds the 8-bit sums of one block to the accumulator.
  void join(int g, const float* c, const float* p_weight, const float* v_scale, int64_t from,
            int64_t to) {
    const F32x16 weight = load(p_weight);
    const float factor = a.v_factor[key_head()];
    float* rows = acc_of(g);
    const int32_t* sum = reinterpret_cast<const int32_t*>(c);
    for (int64_t d = from; d < to && d < shape.Dv; ++d)
      store(rows + d * kLanes,
            fma(to_float(iload(sum + (d - from) * kLanes)), weight * broadcast(v_scale[d] * factor),
                load(rows + d * kLanes)));
  }
  const float* v_scale_of(const Slot& slot) const {
    const AttendArgs& from = *slot.from;
    return kFast ? from.v_scale + (key_head() * from.shape.n_k() + slot.i_k) * shape.Dv : nullptr;
  }

  void finish(const int32_t* kept, int n) {
    bool finite = true;
    const uint8_t* finite_blocks = a.finite + key_head() * shape.n_k();
    for (int i = 0; i < n; ++i) finite &= finite_blocks[kept[i]] != 0;
    for (int64_t i_k = 0; a.pooled && i_k < shape.n_k(); ++i_k)
      finite &= !pools[i_k] || finite_blocks[i_k] != 0;
    const float bound = a.largest[key_head()], back = 1.0f / a.v_factor[key_head()];
    alignas(64) float rows[kLanes * kMaxDim];
    char* out = a.out + query_head() * a.out_stride_h;
    float* lses = a.lse + query_head() * a.lse_stride_h;
    for (int g = 0; g < n_groups; ++g) {
      GroupState& state = groups[g];
      const F32x16 row_sum = load(state.row_sum), row_max = load(state.row_max);
      const Lanes some = less(broadcast(-INFINITY), row_max) | ~at_least(row_max, row_max);
      F32x16 inverse = select(some, broadcast(1.0f) / row_sum, zero());
      Lanes broken = finite ? 0 : kAllLanes;
      broken |= ~less(abs(load(state.q_factor)), broadcast(INFINITY));
      broken |= Lanes(~some & state.may);
      inverse = select(broken, broadcast(NAN), inverse);
      float* o = acc_of(g);
      for (int64_t d = 0; d < width; ++d) {
        const F32x16 x = load(o + d * kLanes) * inverse * broadcast(back);
        // Rounding must not make an average exceed the largest value; NaN is kept.
        store(o + d * kLanes, max(broadcast(-bound), min(broadcast(bound), x)));
      }
      for (int64_t d = 0; d < shape.Dv; d += kLanes)
        transpose(o + d * kLanes, kLanes, rows + d, kMaxDim);
      const int64_t first = i_q * kBlockQ + g * kLanes;
      for (int i = 0; i < kLanes && first + i < shape.Lq; ++i) {
        write_row(out + (first + i) * a.out_stride_l, a.out_dtype, shape.Dv, rows + i * kMaxDim);
        float lse = -INFINITY;
        if (broken >> i & 1)
          lse = NAN;
        else if (some >> i & 1) {
          lse = (state.shift[i] + std::log2(state.row_sum[i])) * kLn2;
          if (a.lse_shift) lse += a.lse_shift[query_head() * shape.Lq + first + i];
        }
        lses[first + i] = lse;
      }
    }
    a.pv_skips[query_head() * shape.n_q() + i_q] = skips_counted;
  }
};

}  // namespace
}  // namespace sparge
