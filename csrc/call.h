// A call as tasks of one driver. A group is a key head with its query heads. Its phases:
//   sums     kinds of blocks, sums of key blocks (then their mean), 8-bit values
//   codes    statistics and codes of keys and queries, facts of key blocks, group means to pool
//   plan     mass map and kept blocks, 16 query blocks at a time; pooled entries; transposed values
//   survey, draw, measure, take    an error budget: rows surveyed, rows drawn, steps measured and
//            taken; facts of raised heads
//   raise    pooled entries and transposed values of raised heads
//   attend   one query block at a time, those with the longest lists first
// A phase of a stage that does not run has no tasks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "block_kinds.h"
#include "driver.h"
#include "error_budget.h"
#include "key_side.h"

namespace sparge {
namespace {

enum Phase : int {
  kSums,
  kCodes,
  kPlan,
  kSurvey,
  kDraw,
  kMeasure,
  kTake,
  kRaise,
  kAttend,
  kPhases
};

class Call : public Job {
 public:
  bool attended = true;
  std::atomic<int64_t> nanoseconds[kTimedStages] = {};  // of all workers

  Call(const Kernels& kernels, const Work& work, int64_t threads, bool timed)
      : k(kernels),
        given(work),
        w(work),
        s(w.shape),
        timed(timed),
        kinds{s, w.mask_b, w.mask_h},
        run_side(k, w),
        own_side(k, w) {
    n_q = s.n_q(), n_k = s.n_k(), heads_k = s.B * s.Hk, heads_q = s.B * s.Hq;
    per_head = blocks_in(n_q, k.query_blocks_per_task);
    find_wanted();
    if (budgets) budget.emplace(k, w, threads);
    raised.assign(size_t(s.Hk), false);
    if (w.raised) std::copy(w.raised, w.raised + s.Hk, raised.begin());
    set_arguments();
    lay_out(kNowhere);
    memory = allocate(bytes);
    if (!memory) throw std::bad_alloc();
    lay_out(memory.get());
    if (plans) {
      const size_t kernels_need =
          std::max(predicts ? k.predict_scratch(predict_args) : 0, k.select_scratch(select_args));
      scratch_bytes = plan_scratch(nullptr).used + kernels_need;
    }
    if (budgets) scratch_bytes = std::max(scratch_bytes, budget->scratch());
    if (attends) {
      scratch_bytes = std::max(scratch_bytes, k.attend_scratch(run_side.args));
      if (may_raise) scratch_bytes = std::max(scratch_bytes, k.attend_scratch(own_side.args));
      order.resize(size_t(heads_q * n_q));
    }
  }

  // Grows with the work: pairs of rows, and 64 times the rows themselves.
  double size() const {
    const double rows_q = double(heads_q * s.Lq), rows_k = double(heads_k * s.Lk);
    const double pairs = rows_q * double(s.Lk) * (w.tokens.is_causal ? 0.5 : 1.0);
    return double(s.D + s.Dv) * (pairs + 64.0 * (rows_q + rows_k));
  }

  int64_t groups() const override { return heads_k; }
  int phases() const override { return kPhases; }
  size_t scratch() const override { return scratch_bytes; }
  void enter() override { k.enter(); }
  void leave() override { k.leave(); }

  int64_t tasks(int64_t g, int phase) const override {
    const int64_t heads = s.group();
    switch (phase) {
      case kSums:
        return kind_tasks(g + 1) - kind_tasks(g) + checks_lists() +
               (sums || codes_v ? chunks() : 0);
      case kCodes:
        return (reads_keys ? chunks() : 0) + (wants_q || budgets ? heads * n_q : 0);
      case kPlan:
        return (plans ? heads * per_head : 0) + (budgets ? heads : 0) + run_side.entry_blocks() +
               (run_side.tile_blocks() ? chunks() : 0);
      case kSurvey:
        return budgets ? heads * budget->survey_tasks() : 0;
      case kDraw:
        return budgets ? heads : 0;
      case kMeasure:
        return budgets ? heads * budget->measure_tasks() : 0;
      case kTake:
        return (budgets ? heads : 0) + (may_raise ? chunks() : 0);
      case kRaise:
        return may_raise ? own_side.entry_blocks() + (own_side.tile_blocks() ? chunks() : 0) : 0;
      default:
        return attends ? heads * n_q : 0;
    }
  }

  void run(int64_t g, int phase, int64_t i, char* scratch) override {
    const int64_t start = now(), heads = s.group(), head = g * heads;
    switch (phase) {
      case kSums:
        sum_keys(g, i);
        return add(Stage::prepare, start);
      case kCodes:
        reads_keys&& i < chunks() ? read_keys(g, i)
                                  : read_queries(head * n_q + i - (reads_keys ? chunks() : 0));
        return add(Stage::prepare, start);
      case kPlan:
        return plan(g, i, scratch, start);
      case kSurvey:
        budget->survey(head + i % heads, i / heads, scratch);
        return add(Stage::select, start);
      case kDraw:
        budget->draw(head + i);
        return add(Stage::select, start);
      case kMeasure:
        budget->measure(head + i % heads, i / heads, scratch);
        return add(Stage::select, start);
      case kTake:
        if (budgets && i < heads) {
          budget->take(head + i);
          return add(Stage::select, start);
        }
        if (is_raised(g))
          each_block(g, i - (budgets ? heads : 0), [&](int64_t block, int64_t j) {
            own_side.find_facts(block);
            own_side.pool_block(g, j);
          });
        return add(Stage::prepare, start);
      case kRaise:
        if (is_raised(g)) finish_side(own_side, g, i);
        return add(Stage::prepare, start);
      default:
        k.attend(is_raised(g) ? own_side.args : run_side.args, order[size_t(head * n_q + i)],
                 scratch);
        return add(Stage::attend, start);
    }
  }

  void finish(int64_t g, int phase) override {
    const int64_t head = g * s.group();
    if (phase == kSums && makes_mean) make_mean(g);
    if (phase == kCodes && attends) run_side.bound(g);
    if (phase == kMeasure && budgets)
      for (int64_t h = head; h < head + s.group(); ++h) budget->find_curves(h);
    if (phase == kTake && is_raised(g)) own_side.bound(g);
    if (phase == kRaise && attends) sort_rows(g);
  }

  // A mask may be shared by all heads, so that its kinds are; an error budget decides for a whole
  // batch; and dense attention may be faster than what was planned.
  bool joins(int phase) const override {
    return (phase == kCodes && kind_tasks(heads_k)) || (phase == kMeasure && budgets) ||
           (phase == kRaise && limited());
  }
  bool join(int64_t, int phase) override {
    if (phase == kMeasure && budgets) {
      budget->decide_all();
      const double* found = w.measured + 2 * heads_q;
      for (int64_t g = 0; may_raise && g < s.Hk; ++g)
        raised[size_t(g)] = found[g * s.group()] != 0.0;
    }
    if (phase == kRaise && limited()) attended = kept_cost() < w.most_kept;
    return attended;
  }

 private:
  inline static char* const kNowhere = reinterpret_cast<char*>(uintptr_t(64));
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
    float* mass = arena.take<float>(w.keep == Keep::all || at.mass ? 0 : n);
    bool* forced = arena.take<bool>(n);
    return {mass, forced, arena.used};
  }

  const Kernels& k;
  const Work given;
  Work w;  // with lists in the memory of the call where none are given
  const Shape& s;
  const bool timed;
  const KindMap kinds;
  KeySide run_side, own_side;
  std::optional<ErrorBudget> budget;
  int64_t n_q, n_k, heads_k, heads_q, per_head;
  // What runs, and what it computes.
  bool predicts, selects, plans, attends, budgets, may_raise, pools;
  bool sums, makes_mean, codes, codes_v, wants_pooled, wants_similarity, wants_k, wants_q;
  bool reads_keys;
  Places at;  // with memory of the call where nothing is given
  StatisticsArgs keys{}, queries{};
  ChannelArgs values{};
  PredictArgs predict_args{};
  SelectArgs select_args{};
  Buffer memory;
  size_t bytes = 0, scratch_bytes = 64;
  std::vector<int64_t> order;
  std::vector<bool> raised;

  int64_t chunks() const { return blocks_in(n_k, kChunk); }
  int64_t first_row(int64_t g) const { return g * s.group() * n_q; }
  bool is_raised(int64_t g) const { return may_raise && raised[size_t(g % s.Hk)]; }
  bool limited() const { return attends && w.most_kept > 0; }
  // A caller's lists are checked before they are read.
  int64_t checks_lists() const { return attends && !selects; }
  // Tasks that find kinds, before those of a group.
  int64_t kind_tasks(int64_t g) const {
    if (w.places.kinds && !w.runs(Stage::mask)) return 0;  // they are given
    return kinds.tasks_before(w.tokens, g, heads_k);
  }

  int64_t now() const {
    if (!timed) return 0;
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  void add(Stage stage, int64_t start) {
    if (timed) nanoseconds[int(stage) - 1].fetch_add(now() - start, std::memory_order_relaxed);
  }

  // Alone, `prepare` makes what it is given places for; else what later stages read.
  void find_wanted() {
    const Places& p = w.places;
    const bool prepares = w.runs(Stage::prepare), alone = w.last == Stage::prepare;
    const bool keeps_some = w.keep != Keep::all;
    predicts = w.runs(Stage::predict) && keeps_some;
    selects = w.runs(Stage::select);
    plans = predicts || selects;
    attends = w.runs(Stage::attend);
    budgets = selects && w.keep == Keep::error;
    may_raise = attends && w.quantized() && (budgets || w.raised);
    const bool scores = attends || budgets || (predicts && w.predictor != Predictor::mean);
    codes = prepares && (alone ? p.k_codes || p.q_codes : w.quantized() && scores);
    codes_v = prepares && (alone ? p.v_codes != nullptr : w.fast() && (attends || budgets));
    pools = alone ? p.entry_key != nullptr : w.pool_group && (attends || budgets);
    wants_pooled = prepares && predicts && w.predictor != Predictor::rows;
    wants_similarity = prepares && predicts && w.min_similarity;
    const bool rows = codes || wants_pooled || wants_similarity;
    wants_k = prepares && (alone ? p.k_codes || p.k_pooled || p.k_similarity : rows);
    wants_q = prepares && (alone ? p.q_codes || p.q_pooled || p.q_similarity : rows);
    makes_mean = prepares && !w.key_mean && (alone ? p.mean != nullptr : rows);
    sums = makes_mean || (prepares && p.sums);
    reads_keys = wants_k || attends || (pools && prepares);
  }

  // Everything that does not depend on where memory lies.
  void set_arguments() {
    keys = {w.key, s.Hk, s.Lk, s.D, kBlockK};
    queries = {w.query, s.Hq, s.Lq, s.D, kBlockQ};
    queries.group = s.group();
    queries.softmax_scale = float(w.softmax_scale);
    values = {w.value, s.Hk, s.Lk, s.Dv};
    predict_args.predictor = w.predictor;
    predict_args.sample_rows = w.sample_rows;

    select_args.shape = s;
    select_args.keep = w.keep;
    select_args.amount = w.amount;
    select_args.masses = w.steps.masses;
    select_args.n_steps = w.steps.n_steps;
    for (KeySide* side : {&run_side, &own_side}) {
      AttendArgs& a = side->args;
      a.shape = s;
      a.softmax_scale = w.softmax_scale;
      a.precision = side == &run_side ? w.precision : w.own_precision();
      a.query = w.query, a.key = w.key, a.value = w.value;
      a.pv_skip = w.pv_skip;
      a.pv_skips = w.pv_skips;
      a.out = w.out, a.out_dtype = w.out_dtype;
      a.out_stride_l = w.out_stride_l, a.out_stride_h = w.out_stride_h;
      a.lse = w.lse, a.lse_stride_h = w.lse_stride_h;
    }
  }

  // Places all that is kept between tasks. At `kNowhere` it only counts bytes: what is wanted has a
  // place then, too, and nothing reads it.
  void lay_out(char* base) {
    Arena arena{base};
    auto place = [&](auto** x, bool wanted, int64_t n) { *x = placed(&arena, *x, wanted, n); };
    at = w.places;
    place(&at.kinds, w.mask_b > 0, kinds.size());
    place(&at.sums, sums, heads_k * n_k * s.D);
    place(&at.mean, makes_mean, heads_k * s.D);
    place(&at.k_codes, codes && wants_k, heads_k * s.Lk * s.D);
    place(&at.k_scale, codes && wants_k, heads_k * s.Lk);
    place(&at.k_pooled, wants_pooled, heads_k * n_k * s.D);
    place(&at.k_similarity, wants_similarity, heads_k * n_k);
    place(&at.q_codes, codes && wants_q, heads_q * s.Lq * s.D);
    place(&at.q_scale, codes && wants_q, heads_q * s.Lq);
    place(&at.q_pooled, wants_pooled, heads_q * n_q * s.D);
    place(&at.q_similarity, wants_similarity, heads_q * n_q);
    place(&at.lse_shift, codes && attends, heads_q * s.Lq);
    place(&at.v_codes, codes_v, heads_k * s.Lk * s.Dv);
    place(&at.v_scale, codes_v, heads_k * n_k * s.Dv);
    w.counts = placed(&arena, given.counts, selects, heads_q * n_q);
    w.indices = placed(&arena, given.indices, selects, heads_q * n_q * n_k);
    w.allowed = placed(&arena, given.allowed, selects, heads_q * n_q);
    select_args.counts = w.counts, select_args.indices = w.indices, select_args.allowed = w.allowed;
    for (KeySide* side : {&run_side, &own_side})
      side->args.counts = w.counts, side->args.indices = w.indices;
    const float* mean = w.key_mean ? w.key_mean : at.mean;
    keys.mean = mean;
    keys.codes = at.k_codes, keys.scale = at.k_scale;
    keys.pooled = at.k_pooled, keys.similarity = at.k_similarity;
    queries.codes = at.q_codes, queries.scale = at.q_scale;
    queries.pooled = at.q_pooled, queries.similarity = at.q_similarity;
    queries.lse_shift = at.lse_shift;
    queries.key_mean = at.lse_shift ? mean : nullptr;
    values.codes = at.v_codes, values.scale = at.v_scale;

    AttendArgs& t = run_side.args;
    t.tokens = w.tokens;
    kinds.attach(at.kinds, &t.tokens);
    own_side.args.tokens = t.tokens;
    if (at.q_codes) t.query = contiguous(at.q_codes, Dtype::i8, s.Hq, s.Lq, s.D);
    if (at.k_codes) t.key = contiguous(at.k_codes, Dtype::i8, s.Hk, s.Lk, s.D);
    if (at.v_codes) t.value = contiguous(at.v_codes, Dtype::i8, s.Hk, s.Lk, s.Dv);
    t.q_scale = {at.q_scale, s.Lq}, t.k_scale = {at.k_scale, s.Lk};
    t.v_scale = at.v_scale;
    t.lse_shift = at.lse_shift;

    static_cast<ScoreArgs&>(predict_args) = t;
    predict_args.q_pooled = at.q_pooled, predict_args.k_pooled = at.k_pooled;
    select_args.tokens = t.tokens;
    if (w.min_similarity) {
      predict_args.similarity.minimum = select_args.similarity.minimum = w.min_similarity;
      predict_args.similarity.key = select_args.similarity.key = at.k_similarity;
      select_args.similarity.query = at.q_similarity;
    }
    if (pools) {
      const bool known = w.quantized() && wants_pooled && w.pool_group == kBlockK;
      run_side.lay_out_entries(&arena, w.places, w.runs(Stage::prepare), mean,
                               known ? at.k_pooled : nullptr);
      if (may_raise) own_side.lay_out_entries(&arena, Places{}, true, nullptr, nullptr);
    }
    if (attends) run_side.lay_out_facts(&arena);
    if (may_raise) own_side.lay_out_facts(&arena);
    if (budgets) budget->lay_out(&arena, t, t, run_side.entry_numbers);
    bytes = arena.used;
  }

  template <class F>
  void each_block(int64_t g, int64_t chunk, const F& f) {
    const int64_t stop = std::min((chunk + 1) * kChunk, n_k);
    for (int64_t j = chunk * kChunk; j < stop; ++j) f(g * n_k + j, j);
  }

  void sum_keys(int64_t g, int64_t i) {
    const int64_t before = kind_tasks(g), of_kinds = kind_tasks(g + 1) - before;
    if (i < of_kinds) return kinds.run(w.tokens, before + i, at.kinds);
    i -= of_kinds;
    if (checks_lists() && i-- == 0)
      return check_lists(w.counts, w.indices, first_row(g), first_row(g + 1), n_k);
    each_block(g, i, [&](int64_t block, int64_t j) {
      if (sums)
        k.sum_rows(w.key, g / s.Hk, g % s.Hk, j * kBlockK, std::min((j + 1) * kBlockK, s.Lk), s.D,
                   at.sums + block * s.D);
      if (codes_v) k.channels(values, block);
    });
  }

  // Added in order, in fp64.
  void make_mean(int64_t g) {
    for (int64_t d = 0; d < s.D; ++d) {
      double total = 0.0;
      for (int64_t j = 0; j < n_k; ++j) total += double(at.sums[(g * n_k + j) * s.D + d]);
      at.mean[g * s.D + d] = float(total * kBlockQ / double(s.Lk));  // rows were scaled
    }
  }

  void read_keys(int64_t g, int64_t i) {
    each_block(g, i, [&](int64_t block, int64_t j) {
      if (wants_k) k.statistics(keys, block);
      run_side.find_facts(block);
      run_side.pool_block(g, j);
    });
  }
  void read_queries(int64_t block) {
    if (wants_q) k.statistics(queries, block);
    if (budgets) budget->find_deviations(block);
  }

  // What a side makes of its key head once the means of groups and the factor of V are known.
  void finish_side(const KeySide& side, int64_t g, int64_t i) {
    if (i < side.entry_blocks()) return side.finish_entries(g, i);
    each_block(g, i - side.entry_blocks(), [&](int64_t block, int64_t) { side.transpose(block); });
  }

  void plan(int64_t g, int64_t i, char* scratch, int64_t start) {
    const int64_t heads = s.group(), plan_tasks = plans ? heads * per_head : 0;
    if (i >= plan_tasks) {
      i -= plan_tasks;
      if (budgets && i < heads) {
        budget->choose(g * heads + i);
        return add(Stage::select, start);
      }
      finish_side(run_side, g, i - (budgets ? heads : 0));
      return add(Stage::prepare, start);
    }
    // The last rows of a causal head may attend the most blocks: they go first.
    const int64_t head = i % heads, piece = per_head - 1 - i / heads;
    const int64_t task = (g * heads + head) * per_head + piece;
    const int64_t first = piece * k.query_blocks_per_task;
    const PlanScratch own = plan_scratch(scratch);
    char* rest = scratch + own.used;
    float* mass = at.mass ? at.mass : own.mass;
    const int64_t mass_start = at.mass ? 0 : first_row(g) + head * n_q + first;
    if (predicts) {
      PredictArgs predicted = predict_args;
      predicted.mass = mass, predicted.mass_start = mass_start;
      k.predict(predicted, task, rest);
      add(Stage::predict, start);
      start = now();
    }
    if (!selects) return;
    SelectArgs chosen = select_args;
    if (w.keep != Keep::all) chosen.mass = mass, chosen.mass_start = mass_start;
    for (int64_t i_q = first; i_q < std::min(first + k.query_blocks_per_task, n_q); ++i_q)
      w.forced.write(s, w.tokens, i_q, own.forced + (i_q - first) * n_k);
    chosen.forced = own.forced, chosen.forced_start = first;
    k.select(chosen, task, rest);
    add(Stage::select, start);
  }

  void sort_rows(int64_t g) {
    const auto begin = order.begin() + first_row(g), end = begin + s.group() * n_q;
    std::iota(begin, end, first_row(g));
    std::stable_sort(begin, end, [&](int64_t x, int64_t y) { return w.counts[x] > w.counts[y]; });
  }

  double kept_cost() const {
    int64_t kept = 0, of_raised = 0, allowed = 0;
    for (int64_t i = 0; i < heads_q * n_q; ++i) {
      (is_raised(i / n_q / s.group()) ? of_raised : kept) += w.counts[i];
      allowed += w.allowed[i];
    }
    const double pooled = kept + of_raised < allowed ? w.pooled_cost * double(allowed) : 0.0;
    return double(kept) + w.raised_cost * double(of_raised) + pooled;
  }
};

// Sequences of a pack, each a call of its own; those with much to do first.
class Calls : public Job {
 public:
  std::vector<std::unique_ptr<Call>> calls;

  explicit Calls(std::vector<std::unique_ptr<Call>> given) : calls(std::move(given)) {
    for (const auto& call : calls) most = std::max(most, call->scratch());
    heads = calls[0]->groups();
  }
  double size() const {
    double all = 0.0;
    for (const auto& call : calls) all += call->size();
    return all;
  }
  int64_t groups() const override { return int64_t(calls.size()) * heads; }
  int phases() const override { return kPhases; }
  int64_t tasks(int64_t g, int p) const override { return of(g).tasks(g % heads, p); }
  size_t scratch() const override { return most; }
  void run(int64_t g, int p, int64_t i, char* scratch) override {
    of(g).run(g % heads, p, i, scratch);
  }
  void finish(int64_t g, int p) override { of(g).finish(g % heads, p); }
  int64_t sets() const override { return int64_t(calls.size()); }
  int64_t set_of(int64_t g) const override { return g / heads; }
  int64_t set_start(int64_t set) const override { return set * heads; }
  bool joins(int p) const override {
    return std::any_of(calls.begin(), calls.end(), [&](const auto& x) { return x->joins(p); });
  }
  bool join(int64_t set, int p) override { return calls[size_t(set)]->join(0, p); }
  void enter() override { calls[0]->enter(); }
  void leave() override { calls[0]->leave(); }

 private:
  size_t most = 0;
  int64_t heads = 0;  // key heads of a sequence
  Call& of(int64_t g) const { return *calls[size_t(g / heads)]; }
};

}  // namespace
}  // namespace sparge
