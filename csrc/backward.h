// Gradients in fp32; the plan and the skipped row groups are constants.
//
//   p  = 2^(s - shift) / row_sum,  ds = p ∘ (do · vᵀ - delta) · scale
//
//   query pass  dq = ds · k: a query is a lane; also finds shift, row_sum and the skipped groups
//   key pass    dv = pᵀ · do, dk = dsᵀ · q: a key is a lane, over the query blocks that keep it
#pragma once

#include "arena.h"
#include "operands.h"
#include "softmax.h"

namespace sparge {
namespace {

// A block of rows as panels, and transposed (a column is a row).
struct Block {
  float *rows, *panels, *transposed;
  int64_t width;
};
inline void take_block(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t total,
                       int64_t D, const Block& to) {
  for (int64_t i = 0; i < total; ++i) {
    if (i < n)
      read_row(x, x.row(b, h, first + i), D, to.rows + i * to.width);
    else
      std::memset(to.rows + i * to.width, 0, size_t(to.width) * 4);
  }
  to_panels(to.rows, to.width, total, int(D), to.panels);
  // [panel of columns][row][column]
  for (int64_t d = 0; d < to.width; d += kRowsAtOnce)
    for (int64_t i = 0; i < total; ++i)
      std::memcpy(to.transposed + d * total + i * kRowsAtOnce, to.rows + i * to.width + d,
                  kRowsAtOnce * 4);
}

inline void pack_lanes(const Rows& x, int64_t b, int64_t h, int64_t first, int64_t n, int64_t D,
                       float* out) {
  const char* rows[kLanes];
  for (int64_t i = 0; i < n; ++i) rows[i] = x.row(b, h, first + i);
  pack_queries<Product::f32>(x, rows, int(n), D, false, out);
}
// [D][16] to contiguous rows of `out`.
inline void write_lanes(const float* lanes, int64_t n, int64_t D, float* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < D; ++d) out[i * D + d] = lanes[d * kLanes + i];
}

struct BackwardScratch {
  Block a, b;  // rows of D and of Dv numbers
  float *queries, *grads, *scores, *dp, *sum, *sum2;
  GroupState* groups;
  GroupMask* mask;

  size_t scratch_bytes;

  BackwardScratch(const BackwardArgs& args, char* scratch) {
    Arena arena{scratch};
    const int64_t widths[2] = {round_up(args.shape.D, kLanes), round_up(args.shape.Dv, kLanes)};
    auto rows = [&](int64_t width) { return arena.take<float>(kBlockQ * size_t(width)); };
    auto block = [&](int64_t width) { return Block{rows(width), rows(width), rows(width), width}; };
    a = block(widths[0]);
    b = block(widths[1]);
    queries = rows(widths[0]);
    grads = rows(widths[1]);
    scores = rows(kLanes);
    dp = rows(kLanes);
    sum = rows(widths[0]);
    sum2 = rows(widths[1]);
    groups = arena.take<GroupState>(kGroups);
    mask = arena.take<GroupMask>(1);
    scratch_bytes = arena.used;
  }
};
size_t backward_scratch(const BackwardArgs& a) { return BackwardScratch(a, nullptr).scratch_bytes; }

inline bool masked_block(const BackwardArgs& a, int64_t b, int64_t h, int64_t i_q, int64_t i_k) {
  return (i_k + 1) * kBlockK > a.shape.Lk || a.tokens.kind(a.shape, b, h, i_q, i_k) != kOpen;
}

void backward_query(const BackwardArgs& a, int64_t task, char* scratch) {
  const Shape& s = a.shape;
  const BackwardScratch t(a, scratch);
  const int64_t i_q = task % s.n_q(), bh = task / s.n_q(), b = bh / s.Hq, h = bh % s.Hq;
  const int64_t h_k = h / s.group(), first = i_q * kBlockQ;
  const int64_t n_rows = s.Lq - first < kBlockQ ? s.Lq - first : kBlockQ;
  const int n_groups = int((n_rows + kLanes - 1) / kLanes);
  const int32_t* kept = a.indices + task * s.n_k();
  const int n = a.counts[task];
  const F32x16 factor = broadcast(float(a.softmax_scale * 1.4426950408889634));
  const float pv_skip = a.pv_skip ? a.pv_skip[h] : INFINITY;

  auto lanes_of = [&](int g) {
    const int64_t left = n_rows - g * kLanes;
    return int(left < kLanes ? left : kLanes);
  };
  for (int g = 0; g < n_groups; ++g) {
    pack_lanes(a.query, b, h, first + g * kLanes, lanes_of(g), s.D, t.queries + g * s.D * kLanes);
    pack_lanes(a.grad_out, b, h, first + g * kLanes, lanes_of(g), s.Dv,
               t.grads + g * s.Dv * kLanes);
    GroupState& state = t.groups[g];
    store(state.row_max, broadcast(-INFINITY));
    store(state.shift, zero());
    store(state.row_sum, zero());
    state.valid = uint16_t((1u << lanes_of(g)) - 1);
  }
  auto score = [&](int g, int64_t i_k) {
    product<Product::f32>(panels_of(t.a.panels, int(s.D)), kBlockK, t.queries + g * s.D * kLanes,
                          int(s.D), t.scores, false);
    const bool masked = masked_block(a, b, h, i_q, i_k);
    if (masked) {
      int64_t rows[kLanes];
      for (int i = 0; i < lanes_of(g); ++i) rows[i] = first + g * kLanes + i;
      mask_group(a.tokens, s, b, h, rows, lanes_of(g), i_k, t.mask);
    }
    return scale_scores<false>(t.scores, 0, kBlockK, nullptr, factor, masked ? t.mask : nullptr,
                               kLog2e, broadcast(-INFINITY));
  };
  auto keys_of = [&](int64_t i_k) {
    return s.Lk - i_k * kBlockK < kBlockK ? s.Lk - i_k * kBlockK : kBlockK;
  };

  for (int i = 0; i < n; ++i) {
    take_block(a.key, b, h_k, kept[i] * int64_t(kBlockK), keys_of(kept[i]), kBlockK, s.D, t.a);
    uint8_t skipped = 0;
    for (int g = 0; g < n_groups; ++g) {
      GroupState& state = t.groups[g];
      const F32x16 most = score(g, kept[i]);
      if (skips(state, most, pv_skip)) {
        skipped |= uint8_t(1u << g);
      } else {
        move_shift(&state, most);
        F32x16 sum = load(state.row_sum);
        const F32x16 shift = load(state.shift);
        for (int j = 0; j < kBlockK; ++j) sum = sum + exp2<6>(load(t.scores + j * kLanes) - shift);
        store(state.row_sum, sum);
      }
      store(state.row_max, max_or_nan(load(state.row_max), most));
    }
    a.skipped[task * s.n_k() + kept[i]] = skipped;
  }
  for (int g = 0; g < n_groups; ++g)
    for (int i = 0; i < lanes_of(g); ++i) {
      a.shift[bh * s.Lq + first + g * kLanes + i] = t.groups[g].shift[i];
      a.row_sum[bh * s.Lq + first + g * kLanes + i] = t.groups[g].row_sum[i];
    }

  std::memset(t.sum, 0, size_t(n_groups) * size_t(t.a.width) * kLanes * 4);
  for (int i = 0; i < n; ++i) {
    const int64_t k = kept[i] * int64_t(kBlockK);
    take_block(a.key, b, h_k, k, keys_of(kept[i]), kBlockK, s.D, t.a);
    take_block(a.value, b, h_k, k, keys_of(kept[i]), kBlockK, s.Dv, t.b);
    for (int g = 0; g < n_groups; ++g) {
      if (a.skipped[task * s.n_k() + kept[i]] >> g & 1) continue;
      score(g, kept[i]);
      product<Product::f32>(panels_of(t.b.panels, int(s.Dv)), kBlockK, t.grads + g * s.Dv * kLanes,
                            int(s.Dv), t.dp, false);
      alignas(64) float delta[kLanes] = {};
      std::memcpy(delta, a.delta + bh * s.Lq + first + g * kLanes, size_t(lanes_of(g)) * 4);
      const GroupState& state = t.groups[g];
      const F32x16 row_sum = load(state.row_sum), shift = load(state.shift), d = load(delta);
      const F32x16 weight =
          select(less(zero(), row_sum), broadcast(float(a.softmax_scale)) / row_sum, zero());
      for (int j = 0; j < kBlockK; ++j) {
        const F32x16 p = exp2<6>(load(t.scores + j * kLanes) - shift) * weight;
        store(t.scores + j * kLanes, p * (load(t.dp + j * kLanes) - d));
      }
      product<Product::f32>(panels_of(t.a.transposed, kBlockK), s.D, t.scores, kBlockK,
                            t.sum + g * t.a.width * kLanes, true);
    }
  }
  for (int g = 0; g < n_groups; ++g)
    write_lanes(t.sum + g * t.a.width * kLanes, lanes_of(g), s.D,
                a.grad_query + (bh * s.Lq + first + g * kLanes) * s.D);
}

void backward_key(const BackwardArgs& a, int64_t task, char* scratch) {
  const Shape& s = a.shape;
  const BackwardScratch t(a, scratch);
  const int64_t i_k = task % s.n_k(), bh = task / s.n_k(), b = bh / s.Hk, h_k = bh % s.Hk;
  const int64_t first = i_k * kBlockK;
  const int64_t n_keys = s.Lk - first < kBlockK ? s.Lk - first : kBlockK;
  const int n_groups = int((n_keys + kLanes - 1) / kLanes);
  const int64_t* readers = a.readers + a.readers_start[task];
  const int64_t n = a.readers_start[task + 1] - a.readers_start[task];
  const float factor = float(a.softmax_scale * 1.4426950408889634);
  auto lanes_of = [&](int g) {
    const int64_t left = n_keys - g * kLanes;
    return int(left < kLanes ? left : kLanes);
  };
  for (int g = 0; g < n_groups; ++g) {
    pack_lanes(a.key, b, h_k, first + g * kLanes, lanes_of(g), s.D, t.queries + g * s.D * kLanes);
    pack_lanes(a.value, b, h_k, first + g * kLanes, lanes_of(g), s.Dv, t.grads + g * s.Dv * kLanes);
  }
  std::memset(t.sum, 0, size_t(n_groups) * size_t(t.a.width) * kLanes * 4);
  std::memset(t.sum2, 0, size_t(n_groups) * size_t(t.b.width) * kLanes * 4);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row_block = readers[i], i_q = row_block % s.n_q(), q_head = row_block / s.n_q();
    const int64_t h = q_head % s.Hq, start = i_q * kBlockQ;
    const int64_t n_rows = s.Lq - start < kBlockQ ? s.Lq - start : kBlockQ;
    take_block(a.query, b, h, start, n_rows, kBlockQ, s.D, t.a);
    take_block(a.grad_out, b, h, start, n_rows, kBlockQ, s.Dv, t.b);
    const uint8_t skipped = a.skipped[row_block * s.n_k() + i_k];
    const bool masked = masked_block(a, b, h, i_q, i_k);
    for (int g = 0; g < n_groups; ++g) {
      product<Product::f32>(panels_of(t.a.panels, int(s.D)), kBlockQ, t.queries + g * s.D * kLanes,
                            int(s.D), t.scores, false);
      product<Product::f32>(panels_of(t.b.panels, int(s.Dv)), kBlockQ, t.grads + g * s.Dv * kLanes,
                            int(s.Dv), t.dp, false);
      for (int64_t r = 0; r < kBlockQ; ++r) {
        float* p_row = t.scores + r * kLanes;
        float* ds_row = t.dp + r * kLanes;
        const int64_t row = q_head * s.Lq + start + r;
        if (r >= n_rows || (skipped >> (r / kLanes) & 1) || !(a.row_sum[row] > 0.0f)) {
          store(p_row, zero());
          store(ds_row, zero());
          continue;
        }
        F32x16 x = load(p_row) * broadcast(factor);
        if (masked) {
          // The mask of one row over 16 keys; lanes are keys here.
          alignas(64) float bias[kLanes] = {};
          Lanes may = 0;
          const TokenMask& m = a.tokens;
          for (int l = 0; l < lanes_of(g); ++l) {
            const int64_t k = first + g * kLanes + l;
            bool ok = !m.is_causal || k <= start + r + m.offset;
            if (ok && m.type != MaskType::none) {
              const char* p = m.data + b * m.stride_b + h * m.stride_h + (start + r) * m.stride_q +
                              k * m.stride_k;
              if (m.type == MaskType::boolean)
                ok = *p != 0;
              else {
                const float y = mask_value(m, p);
                ok = y != -INFINITY;
                if (ok) bias[l] = y;
              }
            }
            may |= Lanes(ok) << l;
          }
          x = max(broadcast(-3.4028234663852886e38f), fma(load(bias), broadcast(kLog2e), x));
          x = select(may, x, broadcast(-INFINITY));
        }
        const F32x16 p = exp2<6>(x - broadcast(a.shift[row])) * broadcast(1.0f / a.row_sum[row]);
        store(p_row, p);
        store(ds_row,
              p * (load(ds_row) - broadcast(a.delta[row])) * broadcast(float(a.softmax_scale)));
      }
      product<Product::f32>(panels_of(t.a.transposed, kBlockQ), s.D, t.dp, kBlockQ,
                            t.sum + g * t.a.width * kLanes, true);
      product<Product::f32>(panels_of(t.b.transposed, kBlockQ), s.Dv, t.scores, kBlockQ,
                            t.sum2 + g * t.b.width * kLanes, true);
    }
  }
  for (int g = 0; g < n_groups; ++g) {
    const int64_t key = bh * s.Lk + first + g * kLanes;
    write_lanes(t.sum + g * t.a.width * kLanes, lanes_of(g), s.D, a.grad_key + key * s.D);
    write_lanes(t.sum2 + g * t.b.width * kLanes, lanes_of(g), s.Dv, a.grad_value + key * s.Dv);
  }
}

}  // namespace
}  // namespace sparge
