// The mass map of 16 query blocks of one head: the share of each key block in their attention.
//
//   mean   softmax_j(scale · q̄_i · k̄_j + log(n_j / 64)): a query block is a lane
//   rows   a few rows of each query block, scored exactly: a row is a lane
//   blend  the average of both
//
// Blocks that may not be attended have mass 0. A query block whose prediction is not finite has
// NaN in every block that it may attend.
#pragma once

#include "arena.h"
#include "score.h"

namespace sparge {
namespace {

constexpr int kBlocksPerTask = kLanes;  // query blocks of one task

struct Predictions {
  const PredictArgs& a;
  const Shape& s;
  int64_t b, h, h_k, first, n_blocks, n_k;
  int64_t stride;  // floats between the rows of `mean` and `rows`
  // In the thread's scratch.
  float *mean, *rows;  // [16][stride] masses
  float *queries, *scores;
  float *block_max, *block_sum;  // [groups][stride][16]
  char* keys;
  size_t scratch_bytes;

  Predictions(const PredictArgs& args, int64_t task, char* scratch) : a(args), s(args.shape) {
    const int64_t per_head = (s.n_q() + kBlocksPerTask - 1) / kBlocksPerTask;
    first = task % per_head * kBlocksPerTask;
    h = task / per_head % s.Hq;
    b = task / per_head / s.Hq;
    h_k = h / s.group();
    n_blocks = s.n_q() - first < kBlocksPerTask ? s.n_q() - first : kBlocksPerTask;
    n_k = s.n_k();
    stride = round_up(n_k, kLanes);
    Arena arena{scratch};
    const size_t masses = size_t(stride) * kLanes;
    const size_t least = RowScores<Product::f32>::kScoreFloats;
    mean = arena.take<float>(masses);
    rows = arena.take<float>(masses);
    queries = arena.take<float>(kMaxCheckGroups * RowScores<Product::f32>::query_floats(s));
    scores = arena.take<float>(masses > least ? masses : least);
    block_max = arena.take<float>(kMaxCheckGroups * masses);
    block_sum = arena.take<float>(kMaxCheckGroups * masses);
    keys = arena.take<char>(RowScores<Product::f32>::key_bytes(s));
    scratch_bytes = arena.used;
  }
  int64_t query_head() const { return b * s.Hq + h; }
  int64_t key_head() const { return b * s.Hk + h_k; }
  bool may_attend(int64_t i, int64_t i_k) const {
    return a.tokens.kind(s, b, h, first + i, i_k) != kExcluded;
  }

  // Softmax over the key blocks, [n_k][16], transposed to [16][n_k].
  void predict_mean() {
    const char* row[kLanes];
    Rows pooled;
    pooled.stride_d = 4;
    for (int64_t i = 0; i < n_blocks; ++i)
      row[i] =
          reinterpret_cast<const char*>(a.q_pooled + (query_head() * s.n_q() + first + i) * s.D);
    pack_queries<Product::f32>(pooled, row, int(n_blocks), s.D, false, queries);
    // 64 pooled keys at a time; the scores have room for a multiple of 16.
    const float* k = a.k_pooled + key_head() * n_k * s.D;
    float* panels = reinterpret_cast<float*>(keys);
    for (int64_t j = 0; j < n_k; j += kBlockK) {
      const int64_t m = n_k - j < kBlockK ? n_k - j : kBlockK;
      to_panels(k + j * s.D, s.D, m, int(s.D), panels);
      product<Product::f32>(panels_of(panels, int(s.D)), m, queries, int(s.D), scores + j * kLanes,
                            false);
    }
    const F32x16 factor = broadcast(float(a.softmax_scale * 1.4426950408889634));
    F32x16 most = broadcast(-INFINITY);
    for (int64_t j = 0; j < n_k; ++j) {
      const int64_t held = s.Lk - j * kBlockK < kBlockK ? s.Lk - j * kBlockK : kBlockK;
      Lanes open = 0;
      if (a.similarity.trusts_column(s, b, h, j))
        for (int64_t i = 0; i < n_blocks; ++i) open |= Lanes(may_attend(i, j)) << i;
      F32x16 x = load(scores + j * kLanes) * factor;
      if (held < kBlockK) x = x + broadcast(float(std::log2(double(held) / kBlockK)));
      x = select(open, x, broadcast(-INFINITY));
      store(scores + j * kLanes, x);
      most = max(x, most);
    }
    const F32x16 shift = select(less(broadcast(-INFINITY), most), most, zero());
    F32x16 sum = zero();
    for (int64_t j = 0; j < n_k; ++j) {
      const F32x16 p = exp2<6>(load(scores + j * kLanes) - shift);
      store(scores + j * kLanes, p);
      sum = sum + p;
    }
    normalize(scores, sum, mean);
  }

  // weights [n_k][16] / sum, transposed to [16][n_k]; zeros where the sum is 0.
  void normalize(float* weights, F32x16 sum, float* out) {
    const Lanes some = ~(at_least(sum, zero()) & at_least(zero(), sum));
    const F32x16 inverse = broadcast(1.0f) / sum;
    for (int64_t j = 0; j < n_k; ++j)
      store(weights + j * kLanes, select(some, load(weights + j * kLanes) * inverse, zero()));
    for (int64_t j = n_k; j < stride; ++j) store(weights + j * kLanes, zero());
    for (int64_t j = 0; j < stride; j += kLanes)
      transpose(weights + j * kLanes, kLanes, out + j, stride);
  }

  template <Product P>
  void predict_rows() {
    std::memset(rows, 0, size_t(stride * kLanes) * 4);
    int attending[kLanes] = {};
    constexpr int most = kMaxCheckGroups * kLanes;
    int64_t row_of[most], block_of[most];
    int n = 0;
    for (int64_t i = 0; i < n_blocks; ++i) {
      const int64_t start = (first + i) * kBlockQ;
      const int64_t valid = s.Lq - start < kBlockQ ? s.Lq - start : kBlockQ;
      const int64_t r = a.sample_rows < valid ? a.sample_rows : valid;
      for (int64_t x = 0; x < r; ++x) {
        row_of[n] = start + (x + 1) * valid / r - 1;
        block_of[n++] = i;
        if (n == most || (i + 1 == n_blocks && x + 1 == r)) {
          score_rows<P>(row_of, block_of, n, attending);
          n = 0;
        }
      }
    }
    for (int64_t i = 0; i < n_blocks; ++i)
      for (int64_t j = 0; attending[i] > 1 && j < n_k; ++j)
        rows[i * stride + j] /= float(attending[i]);
  }

  // Exact masses of some rows, 16 to a group, added to those of their query blocks. The groups
  // share each key block.
  template <Product P>
  void score_rows(const int64_t* row_of, const int64_t* block_of, int n, int* attending) {
    RowScores<P> exact[kMaxCheckGroups];
    alignas(64) float row_max[kMaxCheckGroups][kLanes];
    int64_t end[kMaxCheckGroups] = {};  // no row of the group may attend blocks from here on
    const int n_groups = (n + kLanes - 1) / kLanes;
    for (int g = 0; g < n_groups; ++g) {
      const int left = n - g * kLanes;
      exact[g].begin(a, b, h, row_of + g * kLanes, left < kLanes ? left : kLanes,
                     queries + size_t(g) * RowScores<P>::query_floats(s), scores);
      store(row_max[g], broadcast(-INFINITY));
    }
    for (int64_t j = 0; j < n_k; ++j) {
      KeyBlock key{};
      for (int g = 0; g < n_groups; ++g) {
        float *own_max = block_max + (g * stride + j) * kLanes,
              *own_sum = block_sum + (g * stride + j) * kLanes;
        const Kind kind = exact[g].kind(j);
        if (kind == kExcluded) {
          store(own_max, broadcast(-INFINITY));
          store(own_sum, zero());
          continue;
        }
        end[g] = j + 1;
        if (!key.words.data) key = exact[g].key(j, keys);
        const F32x16 most = exact[g].score(key, j, kind);
        const F32x16 shift = select(less(broadcast(-INFINITY), most), most, zero());
        F32x16 sum = zero();
        for (int i = 0; i < kBlockK; ++i) sum = sum + exp2<6>(load(scores + i * kLanes) - shift);
        store(own_max, most);
        store(own_sum, sum);
        store(row_max[g], max(most, load(row_max[g])));
      }
    }
    for (int g = 0; g < n_groups; ++g)
      add_masses(block_max + g * stride * kLanes, block_sum + g * stride * kLanes, end[g],
                 load(row_max[g]), exact[g].factor, block_of + g * kLanes, exact[g].n, attending);
  }

  void add_masses(const float* of_max, float* of_sum, int64_t end, F32x16 row_max,
                  const float* factor, const int64_t* block_of, int n, int* attending) {
    const F32x16 shift = select(less(broadcast(-INFINITY), row_max), row_max, zero());
    F32x16 whole = zero();
    for (int64_t j = 0; j < end; ++j) {
      const F32x16 highest = load(of_max + j * kLanes), sum = load(of_sum + j * kLanes);
      // A block without a maximum has no mass, unless it has NaN.
      const F32x16 mass =
          select(less(broadcast(-INFINITY), highest), sum * exp2<6>(highest - shift), sum);
      store(of_sum + j * kLanes, mass);
      whole = whole + mass;
    }
    alignas(64) float total[kLanes];
    store(total, whole);
    for (int i = 0; i < n; ++i) {
      if (total[i] == 0.0f) continue;
      ++attending[block_of[i]];
      // A row that is not finite makes the whole prediction of its block NaN.
      const float inverse = std::fabs(factor[i]) < INFINITY ? 1.0f / total[i] : NAN;
      float* out = rows + block_of[i] * stride;
      for (int64_t j = 0; j < end; ++j) out[j] += of_sum[j * kLanes + i] * inverse;
    }
  }

  void write_mass(int64_t i) const {
    const float *of_mean = mean + i * stride, *of_rows = rows + i * stride;
    float* out = a.mass + (query_head() * s.n_q() + first + i - a.mass_start) * n_k;
    bool finite = true;
    for (int64_t j = 0; j < n_k; ++j) {
      out[j] = a.predictor == Predictor::mean   ? of_mean[j]
               : a.predictor == Predictor::rows ? of_rows[j]
                                                : (of_mean[j] + of_rows[j]) * 0.5f;
      finite &= std::fabs(out[j]) < INFINITY;
    }
    for (int64_t j = 0; !finite && j < n_k; ++j) out[j] = may_attend(i, j) ? NAN : 0.0f;
  }

  void run() {
    if (a.predictor != Predictor::rows) predict_mean();
    if (a.predictor != Predictor::mean)
      with_row_product(
          a, [&](auto product) { this->template predict_rows<decltype(product)::value>(); });
    for (int64_t i = 0; i < n_blocks; ++i) write_mass(i);
  }
};

}  // namespace
}  // namespace sparge
