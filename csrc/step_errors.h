// The error of some steps of an error budget, measured on some rows of one head, 16 to a group.
//
//   acc[l]       = Σ p · v over the blocks that measured step l is the first to keep, l = n_slots
//                  for the rest
//   out_s        = Σ_{l <= s} acc[l] / Σ_{l <= s} sum[l]; with pooled entries of the blocks that
//   step
//                  s skips, numerator and denominator + Σ_{l > s} of the same sums over entries
//   skipping[s]  = |out_s - out_all|,  total[s] = |out_s - exact|,  whole = |exact|
//
// p and v are rounded as attention rounds them; `exact` is computed from the caller's own tensors.
// One pass over K and V serves all steps. Scores have a row per lane. The sums are [row][slot]
// [width], because a block may belong to different steps in different rows: each row adds its P · V
// to the sum of its own step.
#pragma once

#include "arena.h"
#include "score.h"

namespace sparge {
namespace {

// Rows of P, words of [key][16], times 16 channels of V, words of [key][pitch], each row added to
// its own sums. Not inlined, for the same reason as product_panel.
template <Product V>
SPARGE_NOINLINE void add_weighted_values(const float* p, const float* v, int64_t pitch,
                                         float* const* sums, int64_t d) {
  F32x16 acc[kRowsAtOnce];
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) acc[m] = load(sums[m] + d);
  for (int j = 0; j < kBlockK / per_word(V); ++j) {
    const auto x = words_at<V>(v + j * pitch + d);
#pragma GCC unroll 16
    for (int m = 0; m < kRowsAtOnce; ++m)
      acc[m] = mad<V>(acc[m], reinterpret_cast<const char*>(p + j * kLanes + m), x);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) store(sums[m] + d, acc[m]);
}

struct StepErrors {
  const BudgetArgs& a;
  const Shape& s;
  const RowTask& task;
  int n_groups;
  int64_t h_k, width;
  // In the thread's scratch.
  float *queries, *exact_queries, *scores, *values, *codes, *discarded;
  float *acc, *sums;                        // of each group, row and step
  float *pooled_acc, *pooled_sums, *mixed;  // the same of pooled entries; one output
  float* exact_acc;                         // of each group and row
  char* keys;
  size_t scratch_bytes;

  StepErrors(const BudgetArgs& args, int64_t i, char* scratch)
      : a(args), s(args.shape), task(args.tasks[i]), width(round_up(args.shape.Dv, kLanes)) {
    using Scores = RowScores<Product::f32>;
    n_groups = (task.n + kLanes - 1) / kLanes;
    h_k = task.h / s.group();
    const size_t groups = size_t(kMaxCheckGroups), w = size_t(width);
    const size_t rows_of_steps = groups * kLanes * size_t(a.n_slots + 1);
    Arena arena{scratch};
    queries = arena.take<float>(groups * Scores::query_floats(s));
    exact_queries = arena.take<float>(groups * Scores::query_floats(s));
    scores = arena.take<float>(Scores::kScoreFloats);
    values = arena.take<float>(kBlockK * w);
    codes = arena.take<float>(kBlockK * w);
    discarded = arena.take<float>(kRowsAtOnce * w);
    acc = arena.take<float>(rows_of_steps * w);
    sums = arena.take<float>(rows_of_steps);
    exact_acc = arena.take<float>(groups * kLanes * w);
    const size_t pools = a.pooled.key.data ? 1 : 0;
    pooled_acc = arena.take<float>(pools * rows_of_steps * w);
    pooled_sums = arena.take<float>(pools * rows_of_steps);
    mixed = arena.take<float>(w);
    keys = arena.take<char>(Scores::key_bytes(s));
    scratch_bytes = arena.used;
  }

  const int64_t* rows_of(int group) const { return task.row + group * kLanes; }
  int rows_in(int group) const {
    const int left = task.n - group * kLanes;
    return left < kLanes ? left : kLanes;
  }
  float* acc_of(int group, int row, int step) const {
    return acc + (int64_t(group * kLanes + row) * (a.n_slots + 1) + step) * width;
  }
  float* sums_of(int group, int row) const {
    return sums + int64_t(group * kLanes + row) * (a.n_slots + 1);
  }
  float* exact_of(int group, int row) const {
    return exact_acc + int64_t(group * kLanes + row) * width;
  }

  // One block of V in the forms that were asked for.
  struct Values {
    const float *rows = nullptr, *pairs = nullptr, *codes = nullptr;
    int64_t pitch = 0;
  };
  template <Product P>
  struct Pass {
    RowScores<P> rows[kMaxCheckGroups];
    GroupState states[kMaxCheckGroups];
  };

  template <Product P>
  void begin(const ScoreArgs& args, float* room, Pass<P>* pass) const {
    for (int g = 0; g < n_groups; ++g) {
      pass->rows[g].begin(args, task.b, task.h, rows_of(g), rows_in(g),
                          room + size_t(g) * RowScores<P>::query_floats(s), scores);
      store(pass->states[g].row_max, broadcast(-INFINITY));
      store(pass->states[g].shift, zero());
      store(pass->states[g].row_sum, zero());
    }
  }

  // P of one block and every group, as the words of product V in `scores`; add(group, sum of P,
  // words of V, their pitch).
  template <Product P, Product V, class Add, class Rescale>
  void take_block(Pass<P>* pass, int64_t j, Values* values, Add add, Rescale fade,
                  bool as_computed) {
    KeyBlock key{};
    const float* value = nullptr;
    int64_t pitch = width;
    for (int g = 0; g < n_groups; ++g) {
      GroupState& state = pass->states[g];
      const Kind kind = pass->rows[g].kind(j);
      if (kind == kExcluded) continue;
      if (!key.words.data) {
        key = pass->rows[g].key(j, keys);
        if constexpr (V == Product::bf16) {
          if (!values->pairs) values->pairs = value_pairs(j);
          value = values->pairs;
        } else if (as_computed && a.v_scale) {
          value = dequantized(j);
        } else {
          if (!values->rows) values->rows = value_rows(j, &values->pitch);
          value = values->rows, pitch = values->pitch;
        }
      }
      const F32x16 most = pass->rows[g].score(key, j, kind);
      if (needs_rescale(state, most)) fade(g, move_shift(&state, most));
      store(state.row_max, max_or_nan(load(state.row_max), most));
      const F32x16 shift = load(state.shift);
      const F32x16 sum = exponentials<V, 4>(scores, 0, kBlockK, shift, scores, zero());
      if (V == Product::f32 && as_computed) round_weights(most, shift);
      add(g, sum, value, pitch);
    }
  }

  template <Product P, Product V>
  void take_exact(Pass<P>* pass, int64_t j, Values* values) {
    take_block<P, V>(
        pass, j, values,
        [&](int g, F32x16 sum, const float* v, int64_t pitch) {
          float* row_sum = pass->states[g].row_sum;
          store(row_sum, load(row_sum) + sum);
          for (int first = 0; first < rows_in(g); first += kRowsAtOnce) {
            float* into[kRowsAtOnce];
            for (int m = 0; m < kRowsAtOnce; ++m)
              into[m] =
                  first + m < rows_in(g) ? exact_of(g, first + m) : discarded + int64_t(m) * width;
            for (int64_t d = 0; d < width; d += kLanes)
              add_weighted_values<V>(scores + first, v, pitch, into, d);
          }
        },
        [&](int g, F32x16 factors) {
          alignas(64) float factor[kLanes];
          store(factor, factors);
          for (int i = 0; i < rows_in(g); ++i) scale_row(exact_of(g, i), width, factor[i]);
        },
        false);
  }
  template <Product P, Product V>
  void take_computed(Pass<P>* pass, int64_t j, Values* values) {
    take_block<P, V>(
        pass, j, values,
        [&](int g, F32x16 sum, const float* v, int64_t pitch) {
          add_to_steps<V>(g, j, sum, v, pitch);
        },
        [&](int g, F32x16 factors) { rescale(g, factors); }, true);
  }

  // What the next block reads, on its way to the cache while this one is computed.
  void fetch(const Rows& x, int64_t h, int64_t i_k, int64_t n) const {
    const int64_t stop = (i_k + 1) * kBlockK < s.Lk ? (i_k + 1) * kBlockK : s.Lk;
    if (!x.data || !has_dense_rows(x)) return;
    for (int64_t l = i_k * kBlockK; l < stop; ++l) {
      const char* row = x.row(task.b, h, l);
      for (int64_t byte = 0; byte < n * x.stride_d; byte += 64) __builtin_prefetch(row + byte);
    }
  }

  // P as attention multiplies it: 16 bits, or 8 with one scale for the block.
  void round_weights(F32x16 most, F32x16 shift) {
    if (a.precision == Precision::exact) return;
    if (a.v_scale) {
      const Lanes some = less(broadcast(-INFINITY), most);
      const F32x16 code = select(some, exp2<6>(most - shift) * broadcast(1.0f / kMaxCodeP), zero());
      // Codes of next to nothing are nothing: their inverse would not be finite.
      const F32x16 inverse = select(less(broadcast(1e-35f), code), broadcast(1.0f) / code, zero());
      for (int j = 0; j < kBlockK; ++j)
        store(scores + j * kLanes, round(load(scores + j * kLanes) * inverse) * code);
      return;
    }
    if (a.value.dtype == Dtype::f16) return;
    for (int j = 0; j < kBlockK; ++j) {
      alignas(64) uint16_t half[kLanes];
      store_bf16(half, load(scores + j * kLanes));
      store(scores + j * kLanes, load_bf16(half));
    }
  }

  static void scale_row(float* row, int64_t n, float factor) {
    if (factor == 1.0f) return;
    for (int64_t d = 0; d < n; d += kLanes) store(row + d, load(row + d) * broadcast(factor));
  }
  void rescale(int group, F32x16 factors) {
    alignas(64) float factor[kLanes];
    store(factor, factors);
    for (int i = 0; i < rows_in(group); ++i) {
      if (factor[i] == 1.0f) continue;
      scale_row(acc_of(group, i, 0), (a.n_slots + 1) * width, factor[i]);
      float* row_sums = sums_of(group, i);
      for (int slot = 0; slot <= a.n_slots; ++slot) row_sums[slot] *= factor[i];
    }
  }

  // One block of V as fp32 rows, `pitch` numbers from each other; in place where possible.
  const float* value_rows(int64_t i_k, int64_t* pitch) const {
    const int64_t start = i_k * kBlockK, n = s.Lk - start < kBlockK ? s.Lk - start : kBlockK;
    const char* in_place = a.value.row(task.b, h_k, start);
    if (n == kBlockK && s.Dv == width && a.value.dtype == Dtype::f32 && has_dense_rows(a.value)) {
      *pitch = a.value.stride_l / 4;
      return reinterpret_cast<const float*>(in_place);
    }
    *pitch = width;
    for (int64_t j = 0; j < n; ++j)
      read_row(a.value, a.value.row(task.b, h_k, start + j), s.Dv, values + j * width);
    std::memset(values + n * width, 0, size_t((kBlockK - n) * width) * 4);
    return values;
  }
  // The same as pairs of bf16, two keys to a word.
  const float* value_pairs(int64_t i_k) const {
    const int64_t start = i_k * kBlockK, n = s.Lk - start < kBlockK ? s.Lk - start : kBlockK;
    int32_t* words = reinterpret_cast<int32_t*>(values);
    with_dtype(a.value.dtype, [&](auto type) {
      for (int64_t j = 0; j < kBlockK; j += 2, words += width) {
        const char *low = a.value.row(task.b, h_k, start + j), *high = low + a.value.stride_l;
        for (int64_t d = 0; d < width; d += kLanes)
          istore(words + d,
                 pair_bf16(j < n ? value_lanes<type()>(a.value, low, d, s.Dv) : zero(),
                           j + 1 < n ? value_lanes<type()>(a.value, high, d, s.Dv) : zero()));
      }
    });
    return values;
  }
  // The same of 8-bit V.
  const float* dequantized(int64_t i_k) const {
    const int64_t start = i_k * kBlockK, n = s.Lk - start < kBlockK ? s.Lk - start : kBlockK;
    alignas(64) float scale[kMaxDim] = {};
    std::memcpy(scale, a.v_scale + ((task.b * s.Hk + h_k) * s.n_k() + i_k) * s.Dv,
                size_t(s.Dv) * 4);
    for (int64_t j = 0; j < n; ++j) {
      float* row = codes + j * width;
      read_row(a.codes, a.codes.row(task.b, h_k, start + j), s.Dv, row);
      for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * load(scale + d));
    }
    std::memset(codes + n * width, 0, size_t((kBlockK - n) * width) * 4);
    return codes;
  }

  template <Product V>
  void add_to_steps(int group, int64_t i_k, F32x16 sum, const float* value, int64_t pitch) {
    alignas(64) float own_sum[kLanes];
    store(own_sum, sum);
    for (int first_row = 0; first_row < rows_in(group); first_row += kRowsAtOnce) {
      float* into[kRowsAtOnce];
      for (int m = 0; m < kRowsAtOnce; ++m) {
        const int i = first_row + m;
        into[m] = discarded + m * width;
        if (i >= rows_in(group)) continue;
        const int64_t i_q = rows_of(group)[i] / kBlockQ;
        const int32_t step =
            a.first_steps[((task.b * s.Hq + task.h) * s.n_q() + i_q) * s.n_k() + i_k];
        if (step < 0) continue;  // a block that the row's query block may not attend
        const int32_t slot = a.slots[step];
        into[m] = acc_of(group, i, slot);
        sums_of(group, i)[slot] += own_sum[i];
      }
      for (int64_t d = 0; d < width; d += kLanes)
        add_weighted_values<V>(scores + first_row, value, pitch, into, d);
    }
  }

  // Pooled entries, once the row maxima of keys are known: none of them is much above those.
  template <Product P>
  void take_pooled(const GroupState* states) {
    const Shape& entries = a.pooled.shape;
    const int64_t per_row = (a.n_slots + 1) * width, per_block = kBlockK / a.pool_group;
    std::memset(pooled_acc, 0, size_t(n_groups * kLanes * per_row) * 4);
    std::memset(pooled_sums, 0, size_t(n_groups * kLanes * (a.n_slots + 1)) * 4);
    RowScores<P> rows[kMaxCheckGroups];
    for (int g = 0; g < n_groups; ++g)
      rows[g].begin(a.pooled, task.b, task.h, rows_of(g), rows_in(g),
                    queries + size_t(g) * RowScores<P>::query_floats(s), scores);
    for (int64_t t = 0; t < entries.n_k(); ++t) {
      const KeyBlock key = rows[0].key(t, keys);
      for (int g = 0; g < n_groups; ++g) {
        rows[g].score(key, t, kOpen);
        for (int j = 0; j < kBlockK && t * kBlockK + j < entries.Lk; ++j) {
          const int64_t e = t * kBlockK + j, i_k = e / per_block;
          const int64_t left = s.Lk - e * a.pool_group;
          const float log_n =
              float(std::log2(double(left < a.pool_group ? left : int64_t(a.pool_group))));
          alignas(64) float p[kLanes];
          store(p, exp2<6>(load(scores + j * kLanes) + broadcast(log_n) - load(states[g].shift)));
          add_entry(g, e, i_k, p);
        }
      }
    }
  }
  void add_entry(int group, int64_t e, int64_t i_k, const float* p) {
    alignas(64) float value[kMaxDim];
    read_row(a.pooled_value, a.pooled_value.row(task.b, h_k, e), s.Dv, value);
    for (int i = 0; i < rows_in(group); ++i) {
      const int64_t i_q = rows_of(group)[i] / kBlockQ;
      if (a.tokens.kind(s, task.b, task.h, i_q, i_k) != kOpen) continue;
      const int32_t step =
          a.first_steps[((task.b * s.Hq + task.h) * s.n_q() + i_q) * s.n_k() + i_k];
      const int64_t at = int64_t(group * kLanes + i) * (a.n_slots + 1) + a.slots[step];
      float* into = pooled_acc + at * width;
      for (int64_t d = 0; d < width; d += kLanes)
        store(into + d, fma(broadcast(p[i]), load(value + d), load(into + d)));
      pooled_sums[at] += p[i];
    }
  }
  // Sums of pooled entries from the densest step on: what steps before skip.
  void add_up_pooled(int group, int row) {
    const int64_t at = int64_t(group * kLanes + row) * (a.n_slots + 1);
    for (int slot = a.n_slots - 1; slot >= 0; --slot) {
      float *own = pooled_acc + (at + slot) * width, *behind = own + width;
      for (int64_t d = 0; d < width; d += kLanes) store(own + d, load(own + d) + load(behind + d));
      pooled_sums[at + slot] += pooled_sums[at + slot + 1];
    }
  }
  // Numerator and denominator of the output of a step.
  const float* output_of(int group, int row, int step, float* sum) const {
    const float* own = acc_of(group, row, step);
    *sum = sums_of(group, row)[step];
    if (!a.pooled.key.data) return own;
    const int64_t at = int64_t(group * kLanes + row) * (a.n_slots + 1) + step + 1;
    for (int64_t d = 0; d < width; d += kLanes)
      store(mixed + d, load(own + d) + load(pooled_acc + at * width + d));
    *sum += pooled_sums[at];
    return mixed;
  }

  // Turns the sums of steps into running sums, outputs, and differences of outputs. Without exact
  // sums, the outputs over all blocks are the exact ones.
  void finish(int group, const GroupState* exact) {
    for (int i = 0; i < rows_in(group); ++i) {
      const int64_t place = task.place[group * kLanes + i];
      double *skipping = a.skipping + place * a.n_slots, *total = a.total + place * (a.n_slots + 1);
      float* row_sums = sums_of(group, i);
      for (int step = 1; step <= a.n_slots; ++step) {
        float *own = acc_of(group, i, step), *before = acc_of(group, i, step - 1);
        for (int64_t d = 0; d < width; d += kLanes)
          store(own + d, load(own + d) + load(before + d));
        row_sums[step] += row_sums[step - 1];
      }
      float* every = acc_of(group, i, a.n_slots);
      scale_row(every, width, inverse_of(row_sums[a.n_slots]));
      float* truth = every;
      if (exact) {
        truth = exact_of(group, i);
        scale_row(truth, width, inverse_of(exact->row_sum[i]));
      }
      a.whole[place] = distance(truth, 1.0f, nullptr);
      if (a.pooled.key.data) add_up_pooled(group, i);
      for (int step = 0; step < a.n_slots; ++step) {
        float sum;
        const float* own = output_of(group, i, step, &sum);
        skipping[step] = distance(own, inverse_of(sum), every);
        total[step] = exact ? distance(own, inverse_of(sum), truth) : skipping[step];
      }
      total[a.n_slots] = exact ? distance(every, 1.0f, truth) : 0.0;
    }
  }
  // Σ |x · factor - y|.
  double distance(const float* x, float factor, const float* y) const {
    F32x16 off = zero();
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32x16 own = load(x + d) * broadcast(factor);
      off = off + abs(y ? own - load(y + d) : own);
    }
    alignas(64) float lanes[kLanes];
    store(lanes, off);
    double sum = 0.0;
    for (int i = 0; i < kLanes; ++i) sum += double(lanes[i]);
    return sum;
  }
  // 1 / sum; 0 for a row that attends nothing.
  static float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Calls f with the product of P · V: pairs of bf16 where attention computes it so, else fp32.
  template <class F>
  static void with_value_product(bool pairs, F f) {
    if constexpr (kHasPairs)
      if (pairs) return f(std::integral_constant<Product, Product::bf16>());
    f(std::integral_constant<Product, Product::f32>());
  }

  // Both passes go through the blocks together: they read the same K and V.
  template <Product PE, Product VE, Product P, Product V>
  void accumulate() {
    const bool rounds = a.exact.query.data != nullptr;
    Pass<PE> exact;
    Pass<P> own;
    if (rounds) begin(a.exact, exact_queries, &exact);
    begin(a, queries, &own);
    std::memset(discarded, 0, size_t(width) * kRowsAtOnce * 4);
    std::memset(exact_acc, 0, size_t(n_groups * width) * kLanes * 4);
    std::memset(acc, 0, size_t(n_groups * (a.n_slots + 1) * width) * kLanes * 4);
    std::memset(sums, 0, size_t(n_groups * (a.n_slots + 1)) * kLanes * 4);
    for (int64_t j = 0; j < s.n_k(); ++j) {
      fetch(a.exact.key, h_k, j + 1, s.D);
      fetch(a.key, h_k, j + 1, s.D);
      fetch(a.value, h_k, j + 1, s.Dv);
      Values values;
      if (rounds) take_exact<PE, VE>(&exact, j, &values);
      take_computed<P, V>(&own, j, &values);
    }
    if (a.pooled.key.data) take_pooled<P>(own.states);
    for (int g = 0; g < n_groups; ++g) finish(g, rounds ? &exact.states[g] : nullptr);
  }

  void run() {
    const bool pairs = a.value.dtype != Dtype::f16;
    // Beside errors of 8 bits, those of bf16 pairs are small, and mostly the same in both passes.
    const bool coarse = a.precision == Precision::int8 || a.precision == Precision::int8_fast;
    with_row_product(a, [&](auto qk) {
      with_value_product(pairs && a.precision != Precision::exact && !a.v_scale, [&](auto pv) {
        with_exact_product([&](auto exact_qk) {
          with_value_product(pairs && coarse, [&](auto exact_pv) {
            this->template accumulate<exact_qk(), exact_pv(), qk(), pv()>();
          });
        });
      });
    });
  }
  // The product of exact scores, which are never of 8 bits.
  template <class F>
  void with_exact_product(F f) const {
    if (a.exact.precision == Precision::half && kScoresHalf != Product::f32)
      f(std::integral_constant<Product, kScoresHalf>());
    else
      f(std::integral_constant<Product, Product::f32>());
  }
};

}  // namespace
}  // namespace sparge
