// torch.ops.sparge_cpu.{attend, backward}.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attend_checks.h"
#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

// Query blocks with long lists first; heads that share keys stay together.
std::vector<int64_t> long_lists_first(const int32_t* counts, int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[size_t(i)] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return counts[x] > counts[y]; });
  return order;
}

// What is known of each key block.
struct BlockFacts {
  std::vector<uint8_t> finite;
  std::vector<float> largest;
  std::vector<int32_t> code_sums;
};
BlockFacts find_facts(const Kernels& k, AttendArgs* a) {
  const Shape& s = a->shape;
  const int64_t heads = s.B * s.Hk, blocks = heads * s.n_k();
  BlockFacts facts{std::vector<uint8_t>(size_t(blocks)), std::vector<float>(size_t(blocks)),
                   std::vector<int32_t>(k.needs_code_sums(*a) ? size_t(heads * s.Lk) : 0)};
  a->code_sums = facts.code_sums.empty() ? nullptr : facts.code_sums.data();
  run_tasks(k, blocks, 64, nullptr, [&](int64_t task, char*) {
    k.find_kv_facts(*a, task, facts.finite.data(), facts.largest.data(),
                    facts.code_sums.empty() ? nullptr : facts.code_sums.data());
  });
  return facts;
}

// Transposed V, where the tile unit needs it.
Buffer transpose_values(const Kernels& k, AttendArgs* a) {
  const int64_t bytes = k.v_tile_bytes(*a), blocks = a->shape.B * a->shape.Hk * a->shape.n_k();
  if (!bytes) return {};
  Buffer tiles = allocate(size_t(bytes * blocks));
  if (!tiles) refuse("no memory for transposed values, ", bytes * blocks, " bytes");
  a->v_tiles = tiles.get();
  a->v_tiles_block = bytes;
  run_tasks(k, blocks, 64, nullptr,
            [&](int64_t task, char*) { k.transpose_value(*a, task, tiles.get()); });
  return tiles;
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor q_scale,
            int64_t q_rows_per_scale, MaybeTensor k_scale, int64_t k_rows_per_scale,
            MaybeTensor v_scale, MaybeTensor pooled_key, MaybeTensor pooled_value,
            MaybeTensor pooled_k_scale, MaybeTensor pooled_v_scale, int64_t pool_group,
            MaybeTensor lse_shift, MaybeTensor pv_skip, const Tensor& counts, const Tensor& indices,
            MaybeTensor mask, MaybeTensor kinds, bool is_causal, int64_t offset, int64_t precision,
            double softmax_scale, Tensor out, Tensor lse, Tensor pv_skips, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  AttendArgs a{};
  a.shape = arguments.shape(query, key, &value);
  const Shape& s = a.shape;
  arguments.scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
                   softmax_scale);
  a.value = arguments.rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  a.v_scale = arguments.read<float>("v_scale", v_scale, {s.B, s.Hk, s.n_k(), s.Dv});
  check_value(a);
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, s);
  a.lse_shift = arguments.read<float>("lse_shift", lse_shift, {s.B, s.Hq, s.Lq});
  a.pv_skip = arguments.read<float>("pv_skip", pv_skip, {s.Hq});
  a.counts = arguments.read<int32_t>("counts", counts, {s.B, s.Hq, s.n_q()});
  a.indices = arguments.read<int32_t>("indices", indices, {s.B, s.Hq, s.n_q(), s.n_k()});
  a.out = arguments.write_floats("out", out, {s.B, s.Hq, s.Lq, s.Dv}, &a.out_dtype);
  a.lse = arguments.write<float>("lse", lse, {s.B, s.Hq, s.Lq});
  a.pv_skips = arguments.write<int32_t>("pv_skips", pv_skips, {s.B, s.Hq, s.n_q()});
  a.out_stride_l = s.Dv * int64_t(out.element_size());
  a.out_stride_h = s.Lq * a.out_stride_l;
  a.lse_stride_h = s.Lq;
  AttendArgs pooled{};
  if (pooled_key) {
    if (!pooled_value) refuse("pooled_value is needed with pooled_key");
    a.pool_group = int(in_range("pool_group", pool_group, 1, kBlockK));
    if (kBlockK % pool_group) refuse("pool_group must divide ", kBlockK, ", got ", pool_group);
    pooled.precision = a.precision;
    pooled.shape = s;
    Shape& p = pooled.shape;
    p.Lk = blocks_of(s.Lk, pool_group);
    pooled.key = arguments.rows("pooled_key", *pooled_key, {p.B, p.Hk, p.Lk, p.D});
    pooled.value = arguments.rows("pooled_value", *pooled_value, {p.B, p.Hk, p.Lk, p.Dv});
    pooled.k_scale = arguments.scales("pooled_k_scale", pooled_k_scale,
                                      pooled.key.dtype == Dtype::i8, "", 1, {p.B, p.Hk, p.Lk});
    pooled.v_scale =
        arguments.read<float>("pooled_v_scale", pooled_v_scale, {p.B, p.Hk, p.n_k(), p.Dv});
    check_pooled(a, pooled);
    a.pooled = &pooled;
  } else if (pooled_value || pooled_k_scale || pooled_v_scale) {
    refuse("pooled_key is needed with pooled_value and its scales");
  }
  const int64_t n = s.B * s.Hq * s.n_q();
  check_lists(k, a.counts, a.indices, n, s.n_k());

  const int64_t heads = s.B * s.Hk;
  BlockFacts facts = find_facts(k, &a);
  std::vector<float> largest(static_cast<size_t>(heads)), factor(static_cast<size_t>(heads));
  bound_values(a, facts.largest.data(), largest.data(), factor.data());
  a.finite = facts.finite.data();
  a.largest = largest.data();
  a.v_factor = factor.data();
  const Buffer tiles = transpose_values(k, &a);
  // Means are no larger than what they are means of, so the factor of V holds for them too.
  BlockFacts pooled_facts;
  Buffer pooled_tiles;
  if (a.pooled) {
    pooled.v_factor = a.v_factor;
    pooled_facts = find_facts(k, &pooled);
    pooled_tiles = transpose_values(k, &pooled);
  }
  const std::vector<int64_t> order = long_lists_first(a.counts, n);
  run_tasks(k, n, k.attend_scratch(a), order.data(),
            [&](int64_t task, char* scratch) { k.attend(a, task, scratch); });
}

void backward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& grad_out,
              const Tensor& delta, MaybeTensor pv_skip, const Tensor& counts, const Tensor& indices,
              MaybeTensor mask, MaybeTensor kinds, bool is_causal, int64_t offset,
              double softmax_scale, Tensor grad_query, Tensor grad_key, Tensor grad_value,
              int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  BackwardArgs a{};
  a.shape = arguments.shape(query, key, &value);
  const Shape& s = a.shape;
  a.query = arguments.float_rows("query", query, {s.B, s.Hq, s.Lq, s.D});
  a.key = arguments.float_rows("key", key, {s.B, s.Hk, s.Lk, s.D});
  a.value = arguments.float_rows("value", value, {s.B, s.Hk, s.Lk, s.Dv});
  a.grad_out = arguments.float_rows("grad_out", grad_out, {s.B, s.Hq, s.Lq, s.Dv});
  a.tokens = tokens_of(k, &arguments, mask, kinds, is_causal, offset, s);
  a.softmax_scale = Arguments::finite("softmax_scale", softmax_scale);
  a.delta = arguments.read<float>("delta", delta, {s.B, s.Hq, s.Lq});
  a.pv_skip = arguments.read<float>("pv_skip", pv_skip, {s.Hq});
  a.counts = arguments.read<int32_t>("counts", counts, {s.B, s.Hq, s.n_q()});
  a.indices = arguments.read<int32_t>("indices", indices, {s.B, s.Hq, s.n_q(), s.n_k()});
  a.grad_query = arguments.write<float>("grad_query", grad_query, {s.B, s.Hq, s.Lq, s.D});
  a.grad_key = arguments.write<float>("grad_key", grad_key, {s.B, s.Hk, s.Lk, s.D});
  a.grad_value = arguments.write<float>("grad_value", grad_value, {s.B, s.Hk, s.Lk, s.Dv});
  const int64_t n = s.B * s.Hq * s.n_q(), n_k = s.n_k(), key_blocks = s.B * s.Hk * n_k;
  check_lists(k, a.counts, a.indices, n, n_k);
  std::vector<float> shift(size_t(s.B * s.Hq * s.Lq)), row_sum(shift.size());
  std::vector<uint8_t> skipped(size_t(n * n_k));
  a.shift = shift.data();
  a.row_sum = row_sum.data();
  a.skipped = skipped.data();
  const std::vector<int64_t> order = long_lists_first(a.counts, n);
  run_tasks(k, n, k.backward_scratch(a), order.data(),
            [&](int64_t task, char* scratch) { k.backward_query(a, task, scratch); });

  // The readers of each key block, in the order of heads and query blocks: sums have one order.
  std::vector<int64_t> start(size_t(key_blocks + 1)), readers;
  auto each = [&](auto f) {
    for (int64_t task = 0; task < n; ++task) {
      const int64_t head = task / s.n_q(), b = head / s.Hq, h_k = head % s.Hq / s.group();
      for (int32_t i = 0; i < a.counts[task]; ++i)
        f(task, (b * s.Hk + h_k) * n_k + a.indices[task * n_k + i]);
    }
  };
  each([&](int64_t, int64_t block) { ++start[size_t(block + 1)]; });
  for (int64_t i = 0; i < key_blocks; ++i) start[size_t(i + 1)] += start[size_t(i)];
  readers.resize(size_t(start[size_t(key_blocks)]));
  std::vector<int64_t> at(start.begin(), start.end() - 1);
  each([&](int64_t task, int64_t block) { readers[size_t(at[size_t(block)]++)] = task; });
  a.readers_start = start.data();
  a.readers = readers.data();
  run_tasks(k, key_blocks, k.backward_scratch(a), nullptr,
            [&](int64_t task, char* scratch) { k.backward_key(a, task, scratch); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor? q_scale, int q_rows_per_scale, "
      "Tensor? k_scale, int k_rows_per_scale, Tensor? v_scale, Tensor? pooled_key, "
      "Tensor? pooled_value, Tensor? pooled_k_scale, Tensor? pooled_v_scale, int pool_group, "
      "Tensor? lse_shift, Tensor? pv_skip, Tensor counts, Tensor indices, Tensor? mask, Tensor? "
      "kinds, bool is_causal, int offset, "
      "int precision, float softmax_scale, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) pv_skips, "
      "int isa) -> ()");
  m.def(
      "backward(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor delta, "
      "Tensor? pv_skip, Tensor counts, Tensor indices, Tensor? mask, Tensor? kinds, "
      "bool is_causal, int offset, float softmax_scale, Tensor(a!) grad_query, "
      "Tensor(b!) grad_key, Tensor(c!) grad_value, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace sparge
