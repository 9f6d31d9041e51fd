// Predict the mass of every block for 16 query blocks of one head, then keep what matters.
//
//   mean   softmax_j(scale · q̄_i · k̄_j + log(n_j / 64)): a query block is a lane
//   rows   a few rows of each query block, scored exactly: a row is a lane
//   blend  the average of both
#pragma once

#include "score.h"
#include "select.h"

namespace sparge {
namespace {

constexpr int kPlanBlocks = kLanes;  // query blocks of one task

struct PlanScratch {
  float *mean, *rows;  // [16][n_k] masses
  float *queries, *scores, *most, *sums;
  char* keys;
  uint8_t *may, *kept;  // [n_k]

  static size_t carve(const PlanArgs& a, char* base, PlanScratch* p) {
    const Shape& s = a.shape;
    const size_t n_k = size_t(round_up(s.n_k(), kLanes)), D = size_t(round_up(s.D, 64));
    size_t at = 0;
    auto take = [&](size_t n) {
      char* start = base + at;
      at += (n + 63) / 64 * 64;
      return start;
    };
    char* part[9] = {take(n_k * kLanes * 4),
                     take(n_k * kLanes * 4),
                     take(D * kLanes * 4 * 2),
                     take((n_k > 2 * kBlockK ? n_k : 2 * kBlockK) * kLanes * 4),
                     take(n_k * kLanes * 4),
                     take(n_k * kLanes * 4),
                     take(D * kBlockK * 4 * 2),
                     take(n_k),
                     take(n_k)};
    if (p) {
      p->mean = reinterpret_cast<float*>(part[0]);
      p->rows = reinterpret_cast<float*>(part[1]);
      p->queries = reinterpret_cast<float*>(part[2]);
      p->scores = reinterpret_cast<float*>(part[3]);
      p->most = reinterpret_cast<float*>(part[4]);
      p->sums = reinterpret_cast<float*>(part[5]);
      p->keys = part[6];
      p->may = reinterpret_cast<uint8_t*>(part[7]);
      p->kept = reinterpret_cast<uint8_t*>(part[8]);
    }
    return at;
  }
};

struct Planner {
  const PlanArgs& a;
  const Shape& s;
  PlanScratch t;
  int64_t b, h, h_k, first, n_blocks, n_k;

  Planner(const PlanArgs& args, int64_t task, char* scratch) : a(args), s(args.shape) {
    PlanScratch::carve(args, scratch, &t);
    const int64_t per_head = (s.n_q() + kPlanBlocks - 1) / kPlanBlocks;
    first = task % per_head * kPlanBlocks;
    h = task / per_head % s.Hq;
    b = task / per_head / s.Hq;
    h_k = h / s.group();
    n_blocks = s.n_q() - first < kPlanBlocks ? s.n_q() - first : kPlanBlocks;
    n_k = s.n_k();
  }
  int64_t query_head() const { return b * s.Hq + h; }
  int64_t key_head() const { return b * s.Hk + h_k; }
  bool may(int64_t i, int64_t i_k) const {
    return a.tokens.kind(s, b, h, first + i, i_k) != kExcluded;
  }
  bool trusts_column(int64_t i_k) const {
    // `not >=` rather than `<`: a block that is not finite is never trusted.
    return !a.min_similarity || a.k_similarity[key_head() * n_k + i_k] >= a.min_similarity[h];
  }
  bool trusts_row(int64_t i) const {
    return !a.min_similarity ||
           a.q_similarity[query_head() * s.n_q() + first + i] >= a.min_similarity[h];
  }

  // Softmax over the lanes' rows of `scores` [n_k][16], turned into masses [16][n_k].
  void predict_mean() {
    const char* rows[kLanes];
    Rows pooled;
    pooled.stride_d = 4;
    for (int64_t i = 0; i < n_blocks; ++i)
      rows[i] =
          reinterpret_cast<const char*>(a.q_pooled + (query_head() * s.n_q() + first + i) * s.D);
    pack_queries<Product::f32>(pooled, rows, int(n_blocks), s.D, false, t.queries);
    // 64 pooled keys at a time; the scores have room for a multiple of 16.
    const float* k = a.k_pooled + key_head() * n_k * s.D;
    float* panels = reinterpret_cast<float*>(t.keys);
    for (int64_t j = 0; j < n_k; j += kBlockK) {
      const int64_t m = n_k - j < kBlockK ? n_k - j : kBlockK;
      to_panels(k + j * s.D, s.D, m, int(s.D), panels);
      product<Product::f32>(panels_of(panels, int(s.D)), m, t.queries, int(s.D),
                            t.scores + j * kLanes, false);
    }
    const F16 factor = all(float(a.softmax_scale * 1.4426950408889634));
    F16 most = all(-INFINITY);
    for (int64_t j = 0; j < n_k; ++j) {
      const int64_t held = s.Lk - j * kBlockK < kBlockK ? s.Lk - j * kBlockK : kBlockK;
      Lanes open = 0;
      if (trusts_column(j))
        for (int64_t i = 0; i < n_blocks; ++i) open |= Lanes(may(i, j)) << i;
      F16 x = load(t.scores + j * kLanes) * factor;
      if (held < kBlockK) x = x + all(float(std::log2(double(held) / kBlockK)));
      x = select(open, x, all(-INFINITY));
      store(t.scores + j * kLanes, x);
      most = max(x, most);
    }
    const F16 shift = select(less(all(-INFINITY), most), most, zero());
    F16 sum = zero();
    for (int64_t j = 0; j < n_k; ++j) {
      const F16 p = exp2<6>(load(t.scores + j * kLanes) - shift);
      store(t.scores + j * kLanes, p);
      sum = sum + p;
    }
    masses(t.scores, sum, t.mean);
  }

  // weights [n_k][16] / sum, turned to [16][n_k]; zeros where the sum is.
  void masses(float* weights, F16 sum, float* out) {
    const Lanes some = ~(at_least(sum, zero()) & at_least(zero(), sum));
    const F16 inverse = all(1.0f) / sum;
    const int64_t stride = round_up(n_k, kLanes);
    for (int64_t j = 0; j < n_k; ++j)
      store(weights + j * kLanes, select(some, load(weights + j * kLanes) * inverse, zero()));
    for (int64_t j = n_k; j < stride; ++j) store(weights + j * kLanes, zero());
    for (int64_t j = 0; j < stride; j += kLanes)
      transpose(weights + j * kLanes, kLanes, out + j, stride);
  }

  template <Product P>
  void predict_rows() {
    const int64_t stride = round_up(n_k, kLanes);
    std::memset(t.rows, 0, size_t(stride * kLanes) * 4);
    int attending[kLanes] = {};
    int64_t row_of[kLanes], block_of[kLanes];
    int n = 0;
    for (int64_t i = 0; i < n_blocks; ++i) {
      const int64_t start = (first + i) * kBlockQ;
      const int64_t valid = s.Lq - start < kBlockQ ? s.Lq - start : kBlockQ;
      const int64_t r = a.sample_rows < valid ? a.sample_rows : valid;
      for (int64_t x = 0; x < r; ++x) {
        row_of[n] = start + (x + 1) * valid / r - 1;
        block_of[n++] = i;
        if (n == kLanes || (i + 1 == n_blocks && x + 1 == r)) {
          score_rows<P>(row_of, block_of, n, attending);
          n = 0;
        }
      }
    }
    for (int64_t i = 0; i < n_blocks; ++i)
      for (int64_t j = 0; attending[i] > 1 && j < n_k; ++j)
        t.rows[i * stride + j] /= float(attending[i]);
  }

  // Exact masses of up to 16 rows, added to those of their query blocks.
  template <Product P>
  void score_rows(const int64_t* row_of, const int64_t* block_of, int n, int* attending) {
    RowScores<P> rows;
    rows.begin(a, b, h, row_of, n, t.queries, t.scores);
    F16 row_max = all(-INFINITY);
    int64_t end = 0;  // blocks from here on lie behind every row's diagonal
    for (int64_t j = 0; j < n_k; ++j) {
      const Kind kind = rows.kind(j);
      if (kind == kExcluded) {
        store(t.most + j * kLanes, all(-INFINITY));
        store(t.sums + j * kLanes, zero());
        continue;
      }
      end = j + 1;
      const F16 most = rows.score(rows.key(j, t.keys), j, kind);
      const F16 shift = select(less(all(-INFINITY), most), most, zero());
      F16 sum = zero();
      for (int i = 0; i < kBlockK; ++i) sum = sum + exp2<6>(load(t.scores + i * kLanes) - shift);
      store(t.most + j * kLanes, most);
      store(t.sums + j * kLanes, sum);
      row_max = max(most, row_max);
    }
    const F16 shift = select(less(all(-INFINITY), row_max), row_max, zero());
    F16 whole = zero();
    for (int64_t j = 0; j < end; ++j) {
      const F16 weight = exp2<6>(load(t.most + j * kLanes) - shift);
      const F16 sum = load(t.sums + j * kLanes);
      // A block without a maximum holds nothing, unless it holds NaN.
      const F16 mass = select(less(all(-INFINITY), load(t.most + j * kLanes)), sum * weight, sum);
      store(t.sums + j * kLanes, mass);
      whole = whole + mass;
    }
    alignas(64) float total[kLanes];
    store(total, whole);
    const int64_t stride = round_up(n_k, kLanes);
    for (int i = 0; i < n; ++i) {
      if (total[i] == 0.0f) continue;
      ++attending[block_of[i]];
      // A row that is not finite makes the whole prediction of its block NaN.
      const float inverse = std::fabs(rows.factor[i]) < INFINITY ? 1.0f / total[i] : NAN;
      float* out = t.rows + block_of[i] * stride;
      for (int64_t j = 0; j < end; ++j) out[j] += t.sums[j * kLanes + i] * inverse;
    }
  }

  void keep_blocks(int64_t i) {
    const int64_t i_q = first + i, stride = round_up(n_k, kLanes);
    const int64_t row = query_head() * s.n_q() + i_q;
    float* mass = a.predictor == Predictor::rows ? t.rows + i * stride : t.mean + i * stride;
    if (a.predictor == Predictor::blend)
      for (int64_t j = 0; j < n_k; ++j) mass[j] = (mass[j] + t.rows[i * stride + j]) * 0.5f;
    int64_t allowed = 0;
    bool known = true, some = false;
    for (int64_t j = 0; j < n_k; ++j) {
      t.may[j] = may(i, j);
      t.kept[j] = 0;
      allowed += t.may[j];
      known &= std::fabs(mass[j]) < INFINITY;
      some |= mass[j] > 0.0f;
    }
    const bool everything = a.keep == Keep::all || !known || !some || !trusts_row(i);
    if (a.keep == Keep::error) return write_steps(i_q, row, mass, allowed, everything);
    if (!everything) select_blocks(mass, t.may, n_k, a.keep, a.amount[h], allowed, t.kept);
    int32_t* out = a.indices + row * n_k;
    int32_t n = 0;
    for (int64_t j = 0; j < n_k; ++j) {
      const bool keeps = everything || t.kept[j] || a.forced[i_q * n_k + j] || !trusts_column(j);
      if (keeps && t.may[j]) out[n++] = int32_t(j);
    }
    a.counts[row] = n;
    a.allowed[row] = int32_t(allowed);
    for (int64_t j = n; j < n_k; ++j) out[j] = -1;
  }

  // In place of a list: of every block the first step that keeps it, -1 where none may.
  void write_steps(int64_t i_q, int64_t row, const float* mass, int64_t allowed, bool everything) {
    int32_t* out = a.indices + row * n_k;
    if (!everything)
      first_steps(mass, t.may, n_k, a.masses + h * a.n_steps, a.n_steps,
                  reinterpret_cast<int32_t*>(t.most), reinterpret_cast<int32_t*>(t.sums), out);
    for (int64_t j = 0; j < n_k; ++j)
      out[j] = !t.may[j] ? -1 : everything || a.forced[i_q * n_k + j] ? 0 : out[j];
    a.allowed[row] = int32_t(allowed);
  }

  void run() {
    if (a.keep != Keep::all) {
      if (a.predictor != Predictor::rows) predict_mean();
      if (a.predictor != Predictor::mean)
        with_row_product(
            a, [&](auto product) { this->template predict_rows<decltype(product)::value>(); });
    }
    for (int64_t i = 0; i < n_blocks; ++i) keep_blocks(i);
  }
};

}  // namespace
}  // namespace sparge
