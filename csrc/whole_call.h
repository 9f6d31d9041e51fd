// A whole call as tasks of one driver: statistics and codes, prediction, selection, attention.
//
// A group is a key head with its query heads. Its phases:
//   sums      sums of key blocks (then their mean), 8-bit values
//   codes     statistics and codes of keys and queries, facts of key blocks, group means to pool
//   plan      mass map and kept blocks, 16 query blocks at a time; pooled entries; transposed
//   values attend    one query block at a time, those with the longest lists first
// The stages are those of the separate ops, so results are the same bit for bit. The mass map
// exists only in the scratch of the task that makes and reads it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <vector>

#include "arch/scalar.h"
#include "arena.h"
#include "attend_checks.h"
#include "block_kinds.h"
#include "driver.h"
#include "forced.h"
#include "isa.h"
#include "tensors.h"

namespace sparge {

// Stages, in the order of the record's seconds.
enum Stage : int { kPrepare, kPredict, kSelect, kAttend, kStages };

// What a call asks for beyond its tensors.
struct Asked {
  Shape shape;
  TokenMask tokens;  // its kinds are computed here
  int64_t mask_b = 0, mask_h = 0;
  Precision precision;
  double softmax_scale;
  Rows query, key, value;
  Keep keep;
  const double* amount;  // [Hq]
  Forced forced;
  Predictor predictor;
  int sample_rows;
  const float* min_similarity;  // [Hq] or null
  const float* pv_skip;         // [Hq] or null
  int pool_group;               // 0 where skipped blocks contribute nothing
  // Attends only if kept blocks (and pooled_cost times the allowed ones, if any is skipped) are
  // fewer than `most_kept`; negative is always.
  double most_kept, pooled_cost;
  int32_t *counts, *indices, *allowed, *pv_skips;
  char* out;
  Dtype out_dtype;
  int64_t out_stride_h, out_stride_l;  // bytes
  float* lse;
  int64_t lse_stride_h;
};

namespace {

class WholeCall : public Job {
 public:
  bool attended = true;
  std::atomic<int64_t> nanoseconds[kStages] = {};  // of all workers

  WholeCall(const Kernels& kernels, const Asked& asked, bool timed)
      : k(kernels), a(asked), s(a.shape), timed(timed) {
    n_q = s.n_q(), n_k = s.n_k(), heads_k = s.B * s.Hk, heads_q = s.B * s.Hq;
    per_head = blocks_of(n_q, k.query_blocks_per_task);
    quantized = a.precision == Precision::int8 || a.precision == Precision::int8_fast;
    fast = a.precision == Precision::int8_fast;
    const bool predicts = a.keep != Keep::all;
    wants_pooled = predicts && a.predictor != Predictor::rows;
    wants_similarity = predicts && a.min_similarity;
    wants_rows = quantized || wants_pooled || wants_similarity;
    pools = a.pool_group > 0;
    entries = pools ? blocks_of(s.Lk, a.pool_group) : 0;
    // Pooled keys of whole blocks are those that prediction reads.
    pools_known = pools && quantized && wants_pooled && a.pool_group == kBlockK;
    pooled_dtype = a.precision == Precision::exact ? Dtype::f32 : a.value.dtype;

    plan_arguments();
    lay_out(nullptr);
    memory = allocate(bytes);
    if (!memory) refuse("no memory for the codes and statistics of a call, ", bytes, " bytes");
    lay_out(memory.get());
    const size_t kernels_need =
        std::max(predicts ? k.predict_scratch(predict_args) : 0, k.select_scratch(select_args));
    scratch_bytes =
        std::max(plan_scratch(nullptr).used + kernels_need, k.attend_scratch(attend_args));
    order.resize(size_t(heads_q * n_q));
  }

  int64_t groups() const override { return heads_k; }
  int phases() const override { return 4; }
  size_t scratch() const override { return scratch_bytes; }
  int64_t tasks(int64_t g, int phase) const override {
    switch (phase) {
      case 0:
        return (wants_rows || fast ? chunks() : 0) + kind_rows(g + 1) - kind_rows(g);
      case 1:
        return chunks() + (wants_rows ? s.group() * n_q : 0);
      case 2:
        return s.group() * per_head + blocks_of(entries, kBlockK) + (v_tiles ? chunks() : 0);
      default:
        return s.group() * n_q;
    }
  }
  void enter() override { k.enter(); }
  void leave() override { k.leave(); }

  void run(int64_t g, int phase, int64_t i, char* scratch) override {
    const int64_t start = now();
    if (phase == 0)
      sum_keys(g, i);
    else if (phase == 1)
      i < chunks() ? code_keys(g, i) : code_queries(g, i - chunks());
    else if (phase == 2)
      return plan(g, i, scratch, start);
    else
      k.attend(attend_args, order[size_t(first_row(g) + i)], scratch);
    add(phase == 3 ? kAttend : kPrepare, start);
  }

  void finish(int64_t g, int phase) override {
    if (phase == 0 && wants_rows) make_mean(g);
    if (phase == 1) bound_head(attend_args, g, facts.largest, largest, factor);
    if (phase == 2) sort_rows(g);
  }

  // A mask may be shared by all heads, so that its kinds are; and dense attention may be faster.
  bool joins(int phase) const override {
    return (phase == 1 && a.mask_b) || (phase == 2 && a.most_kept >= 0);
  }
  bool join(int64_t, int phase) override {
    if (phase == 1 || a.most_kept < 0) return true;
    int64_t kept = 0, allowed = 0;
    for (int64_t i = 0; i < heads_q * n_q; ++i) kept += a.counts[i], allowed += a.allowed[i];
    const double pooled = kept < allowed ? a.pooled_cost * double(allowed) : 0.0;
    attended = double(kept) + pooled < a.most_kept;
    return attended;
  }

 private:
  static constexpr int64_t kChunk = 4;  // key blocks of one task

  // Rows of the mass map and forced blocks of one planning task; the kernels' scratch follows.
  struct PlanScratch {
    float* mass;
    bool* forced;
    size_t used;
  };
  PlanScratch plan_scratch(char* base) const {
    Arena arena{base};
    const size_t n = size_t(k.query_blocks_per_task * n_k);
    float* mass = arena.take<float>(a.keep == Keep::all ? 0 : n);
    bool* forced = arena.take<bool>(n);
    return {mass, forced, arena.used};
  }

  struct Facts {
    uint8_t* finite;
    float* largest;
    int32_t* code_sums;
  };

  const Kernels& k;
  Asked a;
  const Shape& s;
  const bool timed;
  int64_t n_q, n_k, heads_k, heads_q, per_head, entries;
  bool quantized, fast, wants_pooled, wants_similarity, wants_rows, pools, pools_known;
  Dtype pooled_dtype;
  StatisticsArgs keys{}, queries{}, pooled_v{}, pooled_k{}, pooled_codes{};
  ChannelArgs values{}, pooled_values{};
  PredictArgs predict_args{};
  SelectArgs select_args{};
  AttendArgs attend_args{}, pooled_args{};
  Buffer memory;
  size_t bytes = 0, scratch_bytes = 0;
  float *sums = nullptr, *mean = nullptr, *largest = nullptr, *factor = nullptr;
  float *means_v = nullptr, *means_k = nullptr;
  char *cast_v = nullptr, *cast_k = nullptr;
  int8_t* kinds = nullptr;
  char *v_tiles = nullptr, *pooled_tiles = nullptr;
  Facts facts{}, pooled_facts{};
  std::vector<int64_t> order;

  int64_t chunks() const { return blocks_of(n_k, kChunk); }
  int64_t first_row(int64_t g) const { return g * s.group() * n_q; }
  // Rows of the map of kinds that come before those of a group. Where all rows of a mask are the
  // same, one row of blocks holds for all.
  bool same_rows() const { return a.tokens.stride_q == 0 && !a.tokens.is_causal; }
  int64_t kind_rows(int64_t g) const {
    return a.mask_b * a.mask_h * (same_rows() ? 1 : n_q) * g / heads_k;
  }

  int64_t now() const {
    if (!timed) return 0;
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  void add(Stage stage, int64_t start) {
    if (timed) nanoseconds[stage].fetch_add(now() - start, std::memory_order_relaxed);
  }

  static Rows contiguous(const void* data, Dtype dtype, int64_t H, int64_t L, int64_t D) {
    const int64_t size = dtype == Dtype::i8 ? 1 : dtype == Dtype::f32 ? 4 : 2;
    Rows r;
    r.data = static_cast<const char*>(data);
    r.dtype = dtype;
    r.stride_d = size, r.stride_l = D * size, r.stride_h = L * r.stride_l,
    r.stride_b = H * r.stride_h;
    return r;
  }
  static Scales row_scales(const float* data, int64_t L) {
    Scales x;
    x.data = data, x.per_head = L;
    return x;
  }

  // Everything that does not depend on where memory lies.
  void plan_arguments() {
    keys = {a.key, s.Hk, s.Lk, s.D, kBlockK};
    queries = {a.query, s.Hq, s.Lq, s.D, kBlockQ};
    queries.group = s.group();
    queries.softmax_scale = float(a.softmax_scale);
    pooled_v = {a.value, s.Hk, s.Lk, s.Dv, a.pool_group};
    pooled_k = {a.key, s.Hk, s.Lk, s.D, a.pool_group};
    values = {a.value, s.Hk, s.Lk, s.Dv};

    ScoreArgs scored{};
    scored.shape = s;
    scored.tokens = a.tokens;
    scored.precision = a.precision;
    scored.softmax_scale = a.softmax_scale;
    static_cast<ScoreArgs&>(predict_args) = scored;
    static_cast<ScoreArgs&>(attend_args) = scored;
    predict_args.predictor = a.predictor;
    predict_args.sample_rows = a.sample_rows;

    select_args.shape = s;
    select_args.keep = a.keep;
    select_args.amount = a.amount;
    select_args.counts = a.counts;
    select_args.indices = a.indices;
    select_args.allowed = a.allowed;

    attend_args.pv_skip = a.pv_skip;
    attend_args.counts = a.counts;
    attend_args.indices = a.indices;
    attend_args.pv_skips = a.pv_skips;
    attend_args.out = a.out;
    attend_args.out_dtype = a.out_dtype;
    attend_args.out_stride_l = a.out_stride_l;
    attend_args.out_stride_h = a.out_stride_h;
    attend_args.lse = a.lse;
    attend_args.lse_stride_h = a.lse_stride_h;
    if (pools) {
      pooled_args.precision = a.precision;
      pooled_args.shape = s;
      pooled_args.shape.Lk = entries;
      attend_args.pooled = &pooled_args;
      attend_args.pool_group = a.pool_group;
    }
  }

  // Places all that is kept between tasks. Without memory it only counts bytes.
  void lay_out(char* base) {
    Arena arena{base};
    auto floats_if = [&](bool when, int64_t n) {
      return when ? arena.take<float>(size_t(n)) : nullptr;
    };
    auto codes_if = [&](bool when, int64_t n) {
      return when ? arena.take<int8_t>(size_t(n)) : nullptr;
    };
    sums = floats_if(wants_rows, heads_k * n_k * s.D);
    mean = floats_if(wants_rows, heads_k * s.D);
    keys.mean = mean;
    keys.codes = codes_if(quantized, heads_k * s.Lk * s.D);
    keys.scale = floats_if(quantized, heads_k * s.Lk);
    keys.pooled = floats_if(wants_pooled, heads_k * n_k * s.D);
    keys.similarity = floats_if(wants_similarity, heads_k * n_k);
    queries.codes = codes_if(quantized, heads_q * s.Lq * s.D);
    queries.scale = floats_if(quantized, heads_q * s.Lq);
    queries.pooled = floats_if(wants_pooled, heads_q * n_q * s.D);
    queries.similarity = floats_if(wants_similarity, heads_q * n_q);
    queries.lse_shift = floats_if(quantized, heads_q * s.Lq);
    queries.key_mean = quantized ? mean : nullptr;
    values.codes = codes_if(fast, heads_k * s.Lk * s.Dv);
    values.scale = floats_if(fast, heads_k * n_k * s.Dv);
    kinds = codes_if(a.mask_b > 0, a.mask_b * a.mask_h * n_q * n_k);

    AttendArgs& t = attend_args;
    t.query = quantized ? contiguous(queries.codes, Dtype::i8, s.Hq, s.Lq, s.D) : a.query;
    t.key = quantized ? contiguous(keys.codes, Dtype::i8, s.Hk, s.Lk, s.D) : a.key;
    t.q_scale = row_scales(queries.scale, s.Lq), t.k_scale = row_scales(keys.scale, s.Lk);
    t.value = fast ? contiguous(values.codes, Dtype::i8, s.Hk, s.Lk, s.Dv) : a.value;
    t.v_scale = values.scale;
    t.lse_shift = queries.lse_shift;
    t.tokens.kinds = kinds;
    t.tokens.kinds_q = n_k;
    t.tokens.kinds_h = a.mask_h == 1 ? 0 : n_q * n_k;
    t.tokens.kinds_b = a.mask_b == 1 ? 0 : a.mask_h * n_q * n_k;
    largest = floats_if(true, heads_k);
    factor = floats_if(true, heads_k);
    t.largest = largest, t.v_factor = factor;
    take_facts(&arena, &t, &facts, &v_tiles);
    t.finite = facts.finite;

    PredictArgs& p = predict_args;
    p.tokens = t.tokens, p.query = t.query, p.key = t.key;
    p.q_scale = t.q_scale, p.k_scale = t.k_scale;
    p.q_pooled = queries.pooled, p.k_pooled = keys.pooled;
    select_args.tokens = t.tokens;
    if (wants_similarity) {
      p.similarity.minimum = select_args.similarity.minimum = a.min_similarity;
      p.similarity.key = select_args.similarity.key = keys.similarity;
      select_args.similarity.query = queries.similarity;
    }
    if (pools) lay_out_pooled(&arena);
    bytes = arena.used;
  }

  void lay_out_pooled(Arena* arena) {
    AttendArgs& p = pooled_args;
    means_v = arena->take<float>(size_t(heads_k * entries * s.Dv));
    means_k = arena->take<float>(size_t(heads_k * entries * s.D));
    pooled_v.pooled = means_v;
    pooled_k.pooled = pools_known ? nullptr : means_k;
    pooled_k.mean = quantized ? mean : nullptr;
    const Rows v = contiguous(means_v, Dtype::f32, s.Hk, entries, s.Dv);
    const Rows x = contiguous(means_k, Dtype::f32, s.Hk, entries, s.D);
    const bool casts = pooled_dtype != Dtype::f32;
    p.value = v, p.key = x;
    if (fast) {
      pooled_values = {v, s.Hk, entries, s.Dv};
      pooled_values.codes = arena->take<int8_t>(size_t(heads_k * entries * s.Dv));
      pooled_values.scale = arena->take<float>(size_t(heads_k * p.shape.n_k() * s.Dv));
      p.value = contiguous(pooled_values.codes, Dtype::i8, s.Hk, entries, s.Dv);
      p.v_scale = pooled_values.scale;
    } else if (casts) {
      cast_v = arena->take<char>(size_t(heads_k * entries * s.Dv * 2));
      p.value = contiguous(cast_v, pooled_dtype, s.Hk, entries, s.Dv);
    }
    if (quantized) {
      pooled_codes = {x, s.Hk, entries, s.D, kBlockK};
      pooled_codes.codes = arena->take<int8_t>(size_t(heads_k * entries * s.D));
      pooled_codes.scale = arena->take<float>(size_t(heads_k * entries));
      p.key = contiguous(pooled_codes.codes, Dtype::i8, s.Hk, entries, s.D);
      p.k_scale = row_scales(pooled_codes.scale, entries);
    } else if (casts) {
      cast_k = arena->take<char>(size_t(heads_k * entries * s.D * 2));
      p.key = contiguous(cast_k, pooled_dtype, s.Hk, entries, s.D);
    }
    p.v_factor = factor;
    take_facts(arena, &p, &pooled_facts, &pooled_tiles);
  }

  void take_facts(Arena* arena, AttendArgs* x, Facts* f, char** tiles) {
    const int64_t blocks = heads_k * x->shape.n_k();
    f->finite = arena->take<uint8_t>(size_t(blocks));
    f->largest = arena->take<float>(size_t(blocks));
    const bool sums = k.needs_code_sums(*x);
    f->code_sums = sums ? arena->take<int32_t>(size_t(heads_k * x->shape.Lk)) : nullptr;
    x->code_sums = f->code_sums;
    x->v_tiles_block = k.v_tile_bytes(*x);
    *tiles = x->v_tiles_block ? arena->take<char>(size_t(blocks * x->v_tiles_block)) : nullptr;
    x->v_tiles = *tiles;
  }

  template <class F>
  void each_block(int64_t g, int64_t chunk, const F& f) {
    const int64_t stop = std::min((chunk + 1) * kChunk, n_k);
    for (int64_t j = chunk * kChunk; j < stop; ++j) f(g * n_k + j, j);
  }

  void sum_keys(int64_t g, int64_t i) {
    const int64_t n = wants_rows || fast ? chunks() : 0;
    if (i >= n) return find_kinds(kind_rows(g) + i - n);
    each_block(g, i, [&](int64_t task, int64_t j) {
      if (wants_rows)
        k.sum_rows(a.key, g / s.Hk, g % s.Hk, j * kBlockK, std::min((j + 1) * kBlockK, s.Lk), s.D,
                   sums + task * s.D);
      if (fast) k.channels(values, task);
    });
  }

  void find_kinds(int64_t task) {
    const int64_t rows = same_rows() ? 1 : n_q, head = task / rows, i_q = task % rows;
    int8_t* row = kinds + (head * n_q + i_q) * n_k;
    kinds_of_row(a.tokens, head / a.mask_h, head % a.mask_h, i_q, s.Lq, s.Lk, row);
    for (int64_t i = 1; same_rows() && i < n_q; ++i) std::copy(row, row + n_k, row + i * n_k);
  }

  // Added in order, in fp64.
  void make_mean(int64_t g) {
    for (int64_t d = 0; d < s.D; ++d) {
      double total = 0.0;
      for (int64_t j = 0; j < n_k; ++j) total += double(sums[(g * n_k + j) * s.D + d]);
      mean[g * s.D + d] = float(total * kBlockQ / double(s.Lk));  // rows were scaled
    }
  }

  void code_keys(int64_t g, int64_t i) {
    each_block(g, i, [&](int64_t task, int64_t j) {
      if (wants_rows) k.statistics(keys, task);
      k.find_kv_facts(attend_args, task, facts.finite, facts.largest, facts.code_sums);
      if (!pools) return;
      const int64_t per_block = kBlockK / a.pool_group;
      for (int64_t e = j * per_block; e < std::min((j + 1) * per_block, entries); ++e) {
        k.statistics(pooled_v, g * entries + e);
        if (!pools_known) k.statistics(pooled_k, g * entries + e);
      }
    });
  }

  void code_queries(int64_t g, int64_t i) { k.statistics(queries, first_row(g) + i); }

  void plan(int64_t g, int64_t i, char* scratch, int64_t start) {
    const int64_t plans = s.group() * per_head, pooled_blocks = blocks_of(entries, kBlockK);
    if (i >= plans) {
      i -= plans;
      if (i < pooled_blocks)
        pool(g, i);
      else
        each_block(g, i - pooled_blocks,
                   [&](int64_t task, int64_t) { k.transpose_value(attend_args, task, v_tiles); });
      return add(kPrepare, start);
    }
    // The last rows of a causal head may attend the most blocks: they go first.
    const int64_t head = i % s.group(), piece = per_head - 1 - i / s.group();
    const int64_t task = (g * s.group() + head) * per_head + piece;
    const int64_t first = piece * k.query_blocks_per_task;
    const PlanScratch own = plan_scratch(scratch);
    char* rest = scratch + own.used;
    SelectArgs chosen = select_args;
    if (a.keep != Keep::all) {
      PredictArgs predicted = predict_args;
      predicted.mass = own.mass;
      predicted.mass_start = first_row(g) + head * n_q + first;
      chosen.mass = predicted.mass, chosen.mass_start = predicted.mass_start;
      k.predict(predicted, task, rest);
      add(kPredict, start);
      start = now();
    }
    for (int64_t i_q = first; i_q < std::min(first + k.query_blocks_per_task, n_q); ++i_q)
      a.forced.write(s, a.tokens, i_q, own.forced + (i_q - first) * n_k);
    chosen.forced = own.forced, chosen.forced_start = first;
    k.select(chosen, task, rest);
    add(kSelect, start);
  }

  // Means that are not finite are 0: their block is known not to be finite by its own numbers.
  static void make_finite(float* x, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = std::fabs(from[i]) < INFINITY ? from[i] : 0.0f;
  }
  void cast(char* to, const float* from, int64_t first, int64_t n) const {
    uint16_t* x = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = first; i < first + n; ++i)
      x[i] = pooled_dtype == Dtype::bf16 ? to_bf16(from[i]) : to_f16(from[i]);
  }

  // 64 pooled entries, as the precision holds keys and values.
  void pool(int64_t g, int64_t i) {
    const int64_t first = g * entries + i * kBlockK, n = std::min(entries - i * kBlockK, 64L);
    const int64_t task = g * pooled_args.shape.n_k() + i;
    make_finite(means_v + first * s.Dv, means_v + first * s.Dv, n * s.Dv);
    make_finite(means_k + first * s.D, (pools_known ? keys.pooled : means_k) + first * s.D,
                n * s.D);
    if (fast) k.channels(pooled_values, task);
    if (cast_v) cast(cast_v, means_v, first * s.Dv, n * s.Dv);
    if (quantized) k.statistics(pooled_codes, task);
    if (cast_k) cast(cast_k, means_k, first * s.D, n * s.D);
    k.find_kv_facts(pooled_args, task, pooled_facts.finite, pooled_facts.largest,
                    pooled_facts.code_sums);
    if (pooled_tiles) k.transpose_value(pooled_args, task, pooled_tiles);
  }

  void sort_rows(int64_t g) {
    const auto begin = order.begin() + first_row(g), end = begin + s.group() * n_q;
    std::iota(begin, end, first_row(g));
    std::stable_sort(begin, end, [&](int64_t x, int64_t y) { return a.counts[x] > a.counts[y]; });
  }
};

// Packed sequences, each a call of its own; those with much to do first.
class WholeCalls : public Job {
 public:
  std::vector<std::unique_ptr<WholeCall>> calls;

  explicit WholeCalls(std::vector<std::unique_ptr<WholeCall>> given) : calls(std::move(given)) {
    for (const auto& call : calls) {
      most = std::max(most, call->scratch());
      limited |= call->joins(2);
    }
    heads = calls[0]->groups();
  }
  int64_t groups() const override { return int64_t(calls.size()) * heads; }
  int phases() const override { return calls[0]->phases(); }
  int64_t tasks(int64_t g, int p) const override { return of(g).tasks(g % heads, p); }
  size_t scratch() const override { return most; }
  void run(int64_t g, int p, int64_t i, char* scratch) override {
    of(g).run(g % heads, p, i, scratch);
  }
  void finish(int64_t g, int p) override { of(g).finish(g % heads, p); }
  int64_t sets() const override { return int64_t(calls.size()); }
  int64_t set_of(int64_t g) const override { return g / heads; }
  int64_t set_start(int64_t set) const override { return set * heads; }
  bool joins(int p) const override { return p == 2 && limited; }  // packs have no mask
  bool join(int64_t set, int p) override { return calls[size_t(set)]->join(0, p); }
  void enter() override { calls[0]->enter(); }
  void leave() override { calls[0]->leave(); }

 private:
  size_t most = 0;
  bool limited = false;
  int64_t heads = 0;  // key heads of a sequence
  WholeCall& of(int64_t g) const { return *calls[size_t(g / heads)]; }
};

}  // namespace
}  // namespace sparge
