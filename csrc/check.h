// What each step of an error budget would cost: rows of one head, 16 to a group, finished with V.
//
//   acc[l]    = Σ p · v over the blocks that step l is the first to keep, l = n_steps for the rest
//   out_s     = Σ_{l <= s} acc[l] / Σ_{l <= s} sum[l]
//   wrong[s]  = Σ_rows |out_s - out_all|,  whole = Σ_rows |out_all|
//
// One pass over K and V serves all steps. In the scores a row is a lane; in the sums it is a row,
// [row][step][width], because rows differ in the step of a block: each adds P · V, V as it lies, to
// where it belongs.
#pragma once

#include "score.h"

namespace sparge {
namespace {

constexpr int kMostGroups = 4;  // of 16 rows, which a task walks together over K and V

// Rows of P, [key][16], times 16 channels of V, each row added to its own sums. Apart from its
// caller as product_panel is, and for the same reason.
SPARGE_APART inline void weigh(const float* p, const float* v, int64_t apart, float* const* sums,
                               int64_t d) {
  F16 acc[kRowsAtOnce];
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) acc[m] = load(sums[m] + d);
  for (int j = 0; j < kBlockK; ++j) {
    const F16 x = load(v + j * apart + d);
#pragma GCC unroll 16
    for (int m = 0; m < kRowsAtOnce; ++m)
      acc[m] = mad_f32(acc[m], reinterpret_cast<const char*>(p + j * kLanes + m), x);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) store(sums[m] + d, acc[m]);
}

struct CheckScratch {
  float *queries, *scores, *values, *nowhere;
  float *acc, *sums;  // of each group, row and step
  char* keys;

  static size_t carve(const PlanArgs& a, char* base, CheckScratch* p) {
    using Scores = RowScores<Product::f32>;
    const size_t width = size_t(round_up(a.shape.Dv, kLanes));
    const size_t steps = size_t(a.n_steps + 1), groups = size_t(a.check_groups);
    size_t at = 0;
    auto take = [&](size_t n) {
      char* start = base + at;
      at += (n + 63) / 64 * 64;
      return start;
    };
    char* part[7] = {take(groups * Scores::query_floats(a.shape) * 4),
                     take(Scores::kScoreFloats * 4),
                     take(kBlockK * width * 4),
                     take(kRowsAtOnce * width * 4),
                     take(groups * steps * width * kLanes * 4),
                     take(groups * steps * kLanes * 4),
                     take(Scores::key_bytes(a.shape))};
    if (p) {
      p->queries = reinterpret_cast<float*>(part[0]);
      p->scores = reinterpret_cast<float*>(part[1]);
      p->values = reinterpret_cast<float*>(part[2]);
      p->nowhere = reinterpret_cast<float*>(part[3]);
      p->acc = reinterpret_cast<float*>(part[4]);
      p->sums = reinterpret_cast<float*>(part[5]);
      p->keys = part[6];
    }
    return at;
  }
};

struct Checker {
  const PlanArgs& a;
  const Shape& s;
  CheckScratch t;
  int64_t b, h, first, n_groups, all_groups, width;

  Checker(const PlanArgs& args, int64_t task, char* scratch)
      : a(args), s(args.shape), width(round_up(args.shape.Dv, kLanes)) {
    CheckScratch::carve(args, scratch, &t);
    all_groups = (a.n_checked + kLanes - 1) / kLanes;
    const int64_t per_head = (all_groups + a.check_groups - 1) / a.check_groups;
    first = task % per_head * a.check_groups;
    n_groups = all_groups - first < a.check_groups ? all_groups - first : a.check_groups;
    h = task / per_head % s.Hq;
    b = task / per_head / s.Hq;
  }

  const int64_t* rows_of(int64_t group) const { return a.checked + (first + group) * kLanes; }
  int rows_in(int64_t group) const {
    const int64_t left = a.n_checked - (first + group) * kLanes;
    return int(left < kLanes ? left : kLanes);
  }
  float* acc_of(int64_t group, int row, int step) const {
    return t.acc + ((group * kLanes + row) * (a.n_steps + 1) + step) * width;
  }
  float* sums_of(int64_t group, int row) const {
    return t.sums + (group * kLanes + row) * (a.n_steps + 1);
  }

  template <Product P>
  void accumulate() {
    RowScores<P> rows[kMostGroups];
    GroupState states[kMostGroups];
    for (int64_t g = 0; g < n_groups; ++g) {
      rows[g].begin(a, b, h, rows_of(g), rows_in(g),
                    t.queries + size_t(g) * RowScores<P>::query_floats(s), t.scores);
      store(states[g].row_max, all(-INFINITY));
      store(states[g].shift, zero());
      store(states[g].row_sum, zero());
    }
    std::memset(t.nowhere, 0, size_t(width) * kRowsAtOnce * 4);
    std::memset(t.acc, 0, size_t(n_groups * (a.n_steps + 1) * width) * kLanes * 4);
    std::memset(t.sums, 0, size_t(n_groups * (a.n_steps + 1)) * kLanes * 4);
    for (int64_t j = 0; j < s.n_k(); ++j) {
      Words key{};
      const float* value = nullptr;
      int64_t apart = width;
      for (int64_t g = 0; g < n_groups; ++g) {
        const Kind kind = rows[g].kind(j);
        if (kind == kExcluded) continue;
        if (!key.data) {
          key = rows[g].key(j, t.keys);
          value = value_rows(rows[g].h_k, j, &apart);
        }
        const F16 most = rows[g].score(key, j, kind);
        if (rises(states[g], most)) fade(g, follow(&states[g], most));
        store(states[g].row_max, max_or_nan(load(states[g].row_max), most));
        const F16 sum = exponentials<Product::f32, 6>(t.scores, 0, kBlockK, load(states[g].shift),
                                                      t.scores, zero());
        add_to_steps(g, j, sum, value, apart);
      }
    }
  }

  void fade(int64_t group, F16 factors) {
    alignas(64) float factor[kLanes];
    store(factor, factors);
    for (int i = 0; i < rows_in(group); ++i) {
      if (factor[i] == 1.0f) continue;
      float *acc = acc_of(group, i, 0), *sums = sums_of(group, i);
      for (int64_t d = 0; d < (a.n_steps + 1) * width; d += kLanes)
        store(acc + d, load(acc + d) * all(factor[i]));
      for (int step = 0; step <= a.n_steps; ++step) sums[step] *= factor[i];
    }
  }

  // One block of V as fp32 rows, `apart` numbers from each other: in place where it lies so.
  const float* value_rows(int64_t h_k, int64_t i_k, int64_t* apart) const {
    const int64_t start = i_k * kBlockK, n = s.Lk - start < kBlockK ? s.Lk - start : kBlockK;
    const char* in_place = a.value.row(b, h_k, start);
    if (n == kBlockK && s.Dv == width && a.value.dtype == Dtype::f32 && lies_together(a.value)) {
      *apart = a.value.stride_l / 4;
      return reinterpret_cast<const float*>(in_place);
    }
    *apart = width;
    for (int64_t j = 0; j < n; ++j)
      read_row(a.value, a.value.row(b, h_k, start + j), s.Dv, t.values + j * width);
    std::memset(t.values + n * width, 0, size_t((kBlockK - n) * width) * 4);
    return t.values;
  }

  void add_to_steps(int64_t group, int64_t i_k, F16 sum, const float* value, int64_t apart) {
    alignas(64) float own_sum[kLanes];
    store(own_sum, sum);
    for (int first_row = 0; first_row < rows_in(group); first_row += kRowsAtOnce) {
      float* sums[kRowsAtOnce];
      for (int m = 0; m < kRowsAtOnce; ++m) {
        const int i = first_row + m;
        sums[m] = t.nowhere + m * width;
        if (i >= rows_in(group)) continue;
        const int64_t i_q = rows_of(group)[i] / kBlockQ;
        const int32_t step = a.indices[((b * s.Hq + h) * s.n_q() + i_q) * s.n_k() + i_k];
        if (step < 0) continue;  // a block that the row's query block may not attend
        sums[m] = acc_of(group, i, step);
        sums_of(group, i)[step] += own_sum[i];
      }
      for (int64_t d = 0; d < width; d += kLanes)
        weigh(t.scores + first_row, value, apart, sums, d);
    }
  }

  // Sums become running sums, those outputs, and those differences.
  void finish(int64_t group) {
    const int64_t at = (b * s.Hq + h) * all_groups + first + group;
    double* wrong = a.wrong + at * a.n_steps;
    a.whole[at] = 0.0;
    for (int step = 0; step < a.n_steps; ++step) wrong[step] = 0.0;
    for (int i = 0; i < rows_in(group); ++i) {
      float* sums = sums_of(group, i);
      for (int step = 1; step <= a.n_steps; ++step) {
        float *acc = acc_of(group, i, step), *before = acc_of(group, i, step - 1);
        for (int64_t d = 0; d < width; d += kLanes)
          store(acc + d, load(acc + d) + load(before + d));
        sums[step] += sums[step - 1];
      }
      const F16 inverse = inverse_of(sums[a.n_steps]);
      const float* every = acc_of(group, i, a.n_steps);
      F16 size = zero();
      for (int64_t d = 0; d < width; d += kLanes) size = size + abs(load(every + d) * inverse);
      a.whole[at] += add_lanes(size);
      for (int step = 0; step < a.n_steps; ++step) {
        const F16 own = inverse_of(sums[step]);
        const float* acc = acc_of(group, i, step);
        F16 off = zero();
        for (int64_t d = 0; d < width; d += kLanes)
          off = off + abs(load(acc + d) * own - load(every + d) * inverse);
        wrong[step] += add_lanes(off);
      }
    }
  }
  // 1 / sum; 0 for a row with nothing.
  static F16 inverse_of(float sum) { return sum == 0.0f ? zero() : all(1.0f / sum); }
  static double add_lanes(F16 x) {
    alignas(64) float lanes[kLanes];
    store(lanes, x);
    double total = 0.0;
    for (int i = 0; i < kLanes; ++i) total += double(lanes[i]);
    return total;
  }

  void run() {
    with_row_product(a,
                     [&](auto product) { this->template accumulate<decltype(product)::value>(); });
    for (int64_t g = 0; g < n_groups; ++g) finish(g);
  }
};

}  // namespace
}  // namespace sparge
