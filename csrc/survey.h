// What an error budget sees of many rows: how far a query is from the mean of its block, and the
// mass that each step drops from some rows.
//
//   deviation[r]   = || q_r - mean of its block ||²
//   dropped[r][s]  = mass of the blocks that step s drops / mass of all blocks
#pragma once

#include "arena.h"
#include "score.h"
#include "statistics.h"

namespace sparge {
namespace {

// One query block.
void deviations(const DeviationArgs& a, int64_t task) {
  const int64_t n_q = (a.L + kBlockQ - 1) / kBlockQ, width = round_up(a.D, kLanes);
  const int64_t bh = task / n_q, b = bh / a.H, h = bh % a.H, start = task % n_q * kBlockQ;
  const int64_t stop = start + kBlockQ < a.L ? start + kBlockQ : a.L;
  alignas(64) float mean[kMaxDim], row[kMaxDim];
  const bool dense = has_dense_rows(a.query) && a.D % kLanes == 0;
  std::memset(mean, 0, sizeof(mean));
  with_dtype(a.query.dtype, [&](auto type) {
    for (int64_t l = start; l < stop; ++l) {
      const char* own = a.query.row(b, h, l);
      if (!dense) read_row(a.query, own, a.D, row);
      for (int64_t d = 0; d < width; d += kLanes) {
        const F32x16 x = dense ? read_lanes<type()>(own + d * a.query.stride_d) : load(row + d);
        store(mean + d, fma(x, broadcast(kLowered), load(mean + d)));
      }
    }
  });
  const F32x16 raise = broadcast(float(kBlockQ) / float(stop - start));
  F32x16 squares = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    const F32x16 x = load(mean + d) * raise;
    store(mean + d, x);
    squares = fma(x, x, squares);
  }
  // Squares of rows are those of their distances from the mean, and of the mean itself.
  float energy = lane_sum(squares) * float(stop - start);
  with_dtype(a.query.dtype, [&](auto type) {
    for (int64_t l = start; l < stop; ++l) {
      const char* own = a.query.row(b, h, l);
      if (!dense) read_row(a.query, own, a.D, row);
      F32x16 sum = zero();
      for (int64_t d = 0; d < width; d += kLanes) {
        const F32x16 x = dense ? read_lanes<type()>(own + d * a.query.stride_d) : load(row + d);
        sum = fma(x - load(mean + d), x - load(mean + d), sum);
      }
      const float off = lane_sum(sum);
      a.deviation[bh * a.L + l] = off;
      energy += off;
    }
  });
  a.energy[task] = energy;
}

struct DroppedMasses {
  const SurveyArgs& a;
  const Shape& s;
  const RowTask& task;
  int n_groups;
  int64_t n_k;
  // In the thread's scratch.
  float *queries, *scores;
  float *block_max, *block_sum;  // [groups][n_k][16]
  char* keys;
  size_t scratch_bytes;

  DroppedMasses(const SurveyArgs& args, int64_t i, char* scratch)
      : a(args), s(args.shape), task(args.tasks[i]) {
    using Scores = RowScores<Product::f32>;
    n_groups = (task.n + kLanes - 1) / kLanes;
    n_k = s.n_k();
    const size_t sums = size_t(kMaxCheckGroups * n_k) * kLanes;
    Arena arena{scratch};
    queries = arena.take<float>(kMaxCheckGroups * Scores::query_floats(s));
    scores = arena.take<float>(Scores::kScoreFloats);
    block_max = arena.take<float>(sums);
    block_sum = arena.take<float>(sums);
    keys = arena.take<char>(Scores::key_bytes(s));
    scratch_bytes = arena.used;
  }

  int rows_in(int group) const {
    const int left = task.n - group * kLanes;
    return left < kLanes ? left : kLanes;
  }

  template <Product P>
  void accumulate() {
    RowScores<P> rows[kMaxCheckGroups];
    alignas(64) float most[kMaxCheckGroups][kLanes];
    for (int g = 0; g < n_groups; ++g) {
      rows[g].begin(a, task.b, task.h, task.row + g * kLanes, rows_in(g),
                    queries + size_t(g) * RowScores<P>::query_floats(s), scores);
      store(most[g], broadcast(-INFINITY));
    }
    for (int64_t j = 0; j < n_k; ++j) {
      KeyBlock key{};
      for (int g = 0; g < n_groups; ++g) {
        float *own_max = block_max + (g * n_k + j) * kLanes,
              *own_sum = block_sum + (g * n_k + j) * kLanes;
        const Kind kind = rows[g].kind(j);
        store(own_max, broadcast(-INFINITY));
        store(own_sum, zero());
        if (kind == kExcluded) continue;
        if (!key.words.data) key = rows[g].key(j, keys);
        const F32x16 highest = rows[g].score(key, j, kind);
        const F32x16 shift = select(less(broadcast(-INFINITY), highest), highest, zero());
        F32x16 even = zero(), odd = zero();
        for (int i = 0; i < kBlockK; i += 2) {
          even = even + exp2<4>(load(scores + i * kLanes) - shift);
          odd = odd + exp2<4>(load(scores + (i + 1) * kLanes) - shift);
        }
        store(own_max, highest);
        store(own_sum, even + odd);
        store(most[g], max(highest, load(most[g])));
      }
    }
    for (int g = 0; g < n_groups; ++g) drop(g, load(most[g]), rows[g].factor);
  }

  void drop(int g, F32x16 row_max, const float* factor) {
    const F32x16 shift = select(less(broadcast(-INFINITY), row_max), row_max, zero());
    double bins[kLanes][kMaxSteps + 1] = {};
    const int32_t* steps[kLanes];
    const int n = rows_in(g);
    for (int i = 0; i < n; ++i)
      steps[i] = a.first_steps +
                 ((task.b * s.Hq + task.h) * s.n_q() + task.row[g * kLanes + i] / kBlockQ) * n_k;
    alignas(64) float mass[kLanes];
    for (int64_t j = 0; j < n_k; ++j) {
      const F32x16 highest = load(block_max + (g * n_k + j) * kLanes);
      const F32x16 sum = load(block_sum + (g * n_k + j) * kLanes);
      const Lanes some = less(broadcast(-INFINITY), highest);
      // A block without a maximum has no mass, unless it has NaN.
      store(mass, select(some, sum * exp2<6>(highest - shift), sum));
      for (int i = 0; i < n; ++i)
        if (steps[i][j] >= 0) bins[i][steps[i][j]] += double(mass[i]);
    }
    for (int i = 0; i < n; ++i) {
      float* out = a.dropped + task.place[g * kLanes + i] * a.n_steps;
      double whole = 0.0, behind = 0.0;
      for (int step = 0; step <= a.n_steps; ++step) whole += bins[i][step];
      const bool finite = std::fabs(factor[i]) < INFINITY;
      for (int step = a.n_steps - 1; step >= 0; --step) {
        behind += bins[i][step + 1];
        out[step] = !finite ? NAN : whole == 0.0 ? 0.0f : float(behind / whole);
      }
    }
  }

  void run() {
    with_row_product(a,
                     [&](auto product) { this->template accumulate<decltype(product)::value>(); });
  }
};

}  // namespace
}  // namespace sparge
