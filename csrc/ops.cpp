// torch.ops.sparge_cpu: `run`, a call or a pack of them from one stage to another, and `backward`.
// Each is one parallel region. The caller allocates every tensor. `isas` lists instruction sets.
#include <torch/csrc/stable/ops.h>

#include <numeric>

#include "backward_call.h"
#include "call.h"
#include "crew.h"
#include "isa.h"
#include "pack.h"
#include "read_work.h"

namespace sparge {
namespace {

const Kernels& kernels_of(int64_t number) {
  const Isa& isa = kIsas[in_range("isa", number, 0, kIsaCount - 1)];
  if (!is_available(isa))
    refuse("isa ", number, " is ", isa.name, ", which this machine does not have");
  return *isa.kernels;
}

using Texts = std::vector<std::string>;
using Facts = std::vector<int64_t>;  // 0 or 1

std::tuple<Texts, Texts, Facts, Facts> isas() {
  Texts names, descriptions;
  Facts available, for_tests;
  for (const Isa& isa : kIsas) {
    names.emplace_back(isa.name);
    descriptions.emplace_back(isa.description);
    available.push_back(is_available(isa));
    for_tests.push_back(isa.for_tests);
  }
  return {names, descriptions, available, for_tests};
}

int64_t threads_here(int64_t asked) {
  const int64_t most = torch::stable::get_num_threads();
  in_range("threads", asked, 0, kMaxLength);
  return std::max<int64_t>(asked && asked < most ? asked : most, 1);
}

// Runs a job of some size on as many threads as pay, of those that it may have. Returns how many
// seconds its end waited for threads that other programs kept from running.
double run_job(Job* job, double size, int64_t most) {
  static Crew crew;
  const int64_t threads = crew.threads_for(size, most);
  std::atomic<int64_t> work{0}, last{0};
  Driver(job).run(threads, [&](int64_t n, const auto& run) {
    auto timed = [&] {
      const int64_t start = thread_nanoseconds();
      run();
      work.fetch_add(thread_nanoseconds() - start, std::memory_order_relaxed);
      const int64_t end = nanoseconds_now();
      for (int64_t seen = last; seen < end && !last.compare_exchange_weak(seen, end);) continue;
    };
    if (n <= 1) return timed();
    torch::stable::parallel_for(0, n, 1, [&](int64_t, int64_t) { timed(); });
  });
  const int64_t waited = nanoseconds_now() - last;
  crew.learn(size, work, waited, threads);
  return double(waited) * 1e-9;
}

template <class F>
auto with_memory(const F& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    refuse("no memory for a call");
  }
}

void add_seconds(const Call& call, double* seconds) {
  for (int i = 0; seconds && i < kTimedStages; ++i)
    seconds[i] += double(call.nanoseconds[i]) * 1e-9;
}

// Packed sequences: query [1, Hq, T, D] and so on hold all of them. `q_rows` and `k_rows` [n, 2]
// have the first row and the number of rows of each, `offsets` [n] the key position of its first
// query. Lists have the shapes [query blocks, Hq] and [pairs of blocks, Hq], in the order of the
// sequences, `measured` [n, 3, Hq]. The output is packed as the inputs are, out [T, Hq, Dv] and lse
// [Hq, T]; rows of other sequences are not written. `limits` [n], if given, are `most_kept` of each
// sequence, and `attended` [n] receives whether it was attended.
bool run_pack(const Kernels& k, const Given& g, WorkReader* reader, Arguments* arguments,
              double* seconds) {
  Work& a = reader->w;
  const Shape whole = a.shape;
  if (whole.B != 1) refuse("B must be 1 in a pack, got ", whole.B);
  if (a.first != Stage::mask || a.last != Stage::attend) refuse("a pack must run all stages");
  if (g.mask) refuse("mask must be None in a pack");
  if (!g.k_rows || !g.offsets || !g.attended || !g.counts || !g.indices || !g.allowed || !g.out ||
      !g.lse || !g.pv_skips || !g.query || !g.key || !g.value)
    refuse(
        "a pack needs query, key, value, k_rows, offsets, counts, indices, allowed, out, lse, "
        "pv_skips and attended");
  const std::vector<Sequence> pack =
      read_pack(arguments, *g.q_rows, *g.k_rows, *g.offsets, whole.Lq, whole.Lk);
  const Sequence& end = pack.back();
  const int64_t n = int64_t(pack.size()), Hq = whole.Hq, last_blocks = blocks_of(end.Lq, kBlockQ);
  const int64_t n_q = end.q_blocks + last_blocks;
  const int64_t pairs = end.pairs + last_blocks * blocks_of(end.Lk, kBlockK);
  const double* most = arguments->read<double>("limits", g.limits, {n});
  for (int64_t i = 0; most && i < n; ++i) Arguments::finite("limits", most[i]);
  a.counts = arguments->write<int32_t>("counts", *g.counts, {n_q, Hq});
  a.indices = arguments->write<int32_t>("indices", *g.indices, {pairs, Hq});
  a.allowed = arguments->write<int32_t>("allowed", *g.allowed, {n_q, Hq});
  a.pv_skips = arguments->write<int32_t>("pv_skips", *g.pv_skips, {n_q, Hq});
  a.measured = arguments->write<double>("measured", g.measured, {n, 3, Hq});
  if (a.rules && !a.measured) refuse("measured is needed by an error budget");
  a.out = arguments->write_floats("out", *g.out, {whole.Lq, Hq, whole.Dv}, &a.out_dtype);
  a.out_stride_h = whole.Dv * int64_t(g.out->element_size()), a.out_stride_l = Hq * a.out_stride_h;
  a.lse = arguments->write<float>("lse", *g.lse, {Hq, whole.Lq});
  a.lse_stride_h = whole.Lq;
  bool* ran = arguments->write<bool>("attended", *g.attended, {n});

  // Those with the most to do first: what is left at the end is short.
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  auto work = [&](int64_t i) { return pack[size_t(i)].Lq * pack[size_t(i)].Lk; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return work(x) > work(y); });
  const int64_t threads = threads_here(g.threads);
  std::vector<std::unique_ptr<Call>> calls;
  for (const int64_t i : order) {
    Work own = a;
    const Sequence& x = pack[size_t(i)];
    own.shape.Lq = x.Lq, own.shape.Lk = x.Lk;
    own.tokens.offset = x.offset;
    own.query.data += x.q_start * a.query.stride_l;
    own.key.data += x.k_start * a.key.stride_l;
    own.value.data += x.k_start * a.value.stride_l;
    own.most_kept = most ? most[i] : 0.0;
    own.counts += x.q_blocks * Hq, own.allowed += x.q_blocks * Hq;
    own.pv_skips += x.q_blocks * Hq, own.indices += x.pairs * Hq;
    if (a.measured) own.measured += i * 3 * Hq;
    own.out += x.q_start * a.out_stride_l;
    own.lse += x.q_start;
    calls.push_back(std::make_unique<Call>(k, own, threads, seconds != nullptr));
  }
  Calls job(std::move(calls));
  const double waited = run_job(&job, job.size(), threads);
  if (seconds) seconds[kTimedStages] += waited;
  bool all = true;
  for (size_t i = 0; i < order.size(); ++i) {
    all &= ran[order[i]] = job.calls[i]->attended;
    add_seconds(*job.calls[i], seconds);
  }
  return all;
}

// Whether attention ran: false where the plan keeps so much that the caller would rather run dense.
// `seconds`, if given: worker time of prepare, predict, select and attend, and how long the end of
// the call waited for threads, are added to it.
bool run(const Given& g) {
  const Kernels& k = kernels_of(g.isa);
  Arguments arguments;
  WorkReader reader(g, &arguments);
  double* seconds = arguments.write<double>("seconds", g.seconds, {kTimedStages + 1});
  if (g.q_rows) return run_pack(k, g, &reader, &arguments, seconds);
  reader.read_places();
  const int64_t threads = threads_here(g.threads);
  Call call(k, reader.w, threads, seconds != nullptr);
  const double waited = run_job(&call, call.size(), threads);
  if (seconds) seconds[kTimedStages] += waited;
  add_seconds(call, seconds);
  return call.attended;
}

void boxed_run(StableIValue* stack, uint64_t, uint64_t) {
  const Given given(stack);
  stack[0] = torch::stable::detail::from(with_memory([&] { return run(given); }));
}

void backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& grad_out,
              const Tensor& delta, MaybeTensor pv_skip, const Tensor& counts, const Tensor& indices,
              MaybeTensor mask, bool is_causal, int64_t offset, double softmax_scale,
              Tensor grad_query, Tensor grad_key, Tensor grad_value, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  BackwardArgs a{};
  a.shape = arguments.shape(query, key, value);
  const Shape& s = a.shape;
  a.query = arguments.float_rows("query", query, {s.B, s.Hq, s.Lq, s.D});
  a.key = arguments.float_rows("key", key, {s.B, s.Hk, s.Lk, s.D});
  a.value = arguments.float_rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  a.grad_out = arguments.float_rows("grad_out", grad_out, {s.B, s.Hq, s.Lq, s.Dv});
  a.tokens = Arguments::diagonal(is_causal, offset);
  if (mask) arguments.take_mask(&a.tokens, *mask, s);
  a.softmax_scale = Arguments::finite("softmax_scale", softmax_scale);
  a.delta = arguments.read<float>("delta", delta, {s.B, s.Hq, s.Lq});
  a.pv_skip = arguments.read<float>("pv_skip", pv_skip, {s.Hq});
  a.counts = arguments.read<int32_t>("counts", counts, {s.B, s.Hq, s.n_q()});
  a.indices = arguments.read<int32_t>("indices", indices, {s.B, s.Hq, s.n_q(), s.n_k()});
  a.grad_query = arguments.write<float>("grad_query", grad_query, {s.B, s.Hq, s.Lq, s.D});
  a.grad_key = arguments.write<float>("grad_key", grad_key, {s.B, s.Hk, s.Lk, s.D});
  a.grad_value = arguments.write<float>("grad_value", grad_value, {s.B, s.Hk, s.Lk, s.Dv});
  with_memory([&] {
    BackwardCall job(k, a, mask ? mask->size(0) : 0, mask ? mask->size(1) : 0);
    run_job(&job, 0.0, threads_here(0));  // gradients are long
    return true;
  });
}

}  // namespace

STABLE_TORCH_LIBRARY(sparge_cpu, m) {
  m.def("isas() -> (str[] names, str[] descriptions, int[] available, int[] for_tests)");
  m.def(kRunSchema);
  m.def(
      "backward(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor delta, "
      "Tensor? pv_skip, Tensor counts, Tensor indices, Tensor? mask, bool is_causal, int offset, "
      "float softmax_scale, Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, "
      "int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CompositeExplicitAutograd, m) {
  m.impl("isas", TORCH_BOX(&isas));
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("run", &boxed_run);
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace sparge
