// What Python calls: torch.ops.sparge_cpu.*. Outputs are allocated by the caller; nothing here is
// larger than K and V themselves. Mistakes of users are found in Python, before any of this.
// Those that plan are in ops_plan.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kinds.h"
#include "tasks.h"
#include "tensors.h"

namespace sparge {
namespace {

// Bit i: this machine has instruction set i.
int64_t available_isas() {
  int count;
  const Isa* all = isas(&count);
  int64_t bits = 0;
  for (int i = 0; i < count; ++i) bits |= int64_t(all[i].available()) << i;
  return bits;
}

// Mean of each head's rows, fp32; blocks are summed on all threads and added up in order, in fp64.
void key_mean(const Tensor& key, Tensor mean, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  const Rows x = rows_of(key);
  const int64_t B = key.size(0), H = key.size(1), L = key.size(2), D = key.size(3);
  const int64_t n = (L + kBlockK - 1) / kBlockK;
  std::vector<float> sums(size_t(B * H * n * D));
  run_tasks(k, B * H * n, 64, nullptr, [&](int64_t task, char*) {
    const int64_t bh = task / n, start = task % n * kBlockK;
    k.sum_rows(x, bh / H, bh % H, start, std::min(start + kBlockK, L), D, &sums[size_t(task * D)]);
  });
  float* out = data_of<float>(mean);
  for (int64_t bh = 0; bh < B * H; ++bh)
    for (int64_t d = 0; d < D; ++d) {
      double total = 0.0;
      for (int64_t i = 0; i < n; ++i) total += double(sums[size_t((bh * n + i) * D + d)]);
      out[bh * D + d] = float(total * kBlockQ / double(L));  // rows were lowered by 1 / kBlockQ
    }
}

void statistics(const Tensor& x, int64_t block, MaybeTensor mean, MaybeTensor codes,
                MaybeTensor scale, MaybeTensor pooled, MaybeTensor similarity, MaybeTensor key_mean,
                double softmax_scale, MaybeTensor lse_shift, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  StatisticsArgs a{};
  a.x = rows_of(x);
  a.H = x.size(1), a.L = x.size(2), a.D = x.size(3);
  a.block = int(block);
  a.mean = data_of<float>(mean);
  a.codes = data_of<int8_t>(codes);
  a.scale = data_of<float>(scale);
  a.pooled = data_of<float>(pooled);
  a.similarity = data_of<float>(similarity);
  a.key_mean = data_of<float>(key_mean);
  a.group = key_mean ? a.H / key_mean->size(1) : 1;
  a.softmax_scale = float(softmax_scale);
  a.lse_shift = data_of<float>(lse_shift);
  const int64_t n = (a.L + block - 1) / block;
  run_tasks(k, x.size(0) * a.H * n, 64, nullptr,
            [&](int64_t task, char*) { k.statistics(a, task); });
}

void channels(const Tensor& value, Tensor codes, Tensor scale, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  ChannelArgs a{};
  a.value = rows_of(value);
  a.H = value.size(1), a.L = value.size(2), a.D = value.size(3);
  a.codes = data_of<int8_t>(codes);
  a.scale = data_of<float>(scale);
  const int64_t n = (a.L + kBlockK - 1) / kBlockK;
  run_tasks(k, value.size(0) * a.H * n, 64, nullptr,
            [&](int64_t task, char*) { k.channels(a, task); });
}

void block_kinds(const Tensor& mask, int64_t Lq, int64_t Lk, bool is_causal, int64_t offset,
                 Tensor kinds, int64_t isa) {
  const TokenMask t = mask_of(mask, std::nullopt, is_causal, offset);
  int8_t* out = data_of<int8_t>(kinds);
  const int64_t n_q = kinds.size(2), n_k = kinds.size(3);
  // Where all rows see the same, one row of blocks says it for all.
  const bool same = t.stride_q == 0 && !is_causal;
  const int64_t rows = same ? 1 : n_q, H = kinds.size(1);
  run_tasks(kernels_of(isa), kinds.size(0) * H * rows, 64, nullptr, [&](int64_t task, char*) {
    const int64_t bh = task / rows, i_q = task % rows;
    int8_t* row = out + (bh * n_q + i_q) * n_k;
    kinds_of_row(t, bh / H, bh % H, i_q, Lq, Lk, row);
    for (int64_t i = 1; same && i < n_q; ++i) std::copy(row, row + n_k, row + i * n_k);
  });
}

// Query blocks with long lists first; heads that share keys stay together.
std::vector<int64_t> long_lists_first(const int32_t* counts, int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[size_t(i)] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return counts[x] > counts[y]; });
  return order;
}

// A power of two for V: 1, unless sums of its largest would overflow, or all of it is so small
// that products which flush subnormal numbers would lose it.
float factor_for(float largest, int64_t Lk) {
  const float room = std::ldexp(1.0f, 126 - 6 - int(std::ceil(std::log2(double(Lk)))));
  if (largest >= room) return std::ldexp(1.0f, -8 - int(std::ceil(std::log2(double(Lk)))));
  if (largest > 0.0f && largest < 0x1p-64f) return 0x1p63f;
  return 1.0f;
}

void attend(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor q_scale,
            int64_t q_rows_per_scale, MaybeTensor k_scale, int64_t k_rows_per_scale,
            MaybeTensor v_scale, MaybeTensor lse_shift, MaybeTensor pv_skip, const Tensor& counts,
            const Tensor& indices, MaybeTensor mask, MaybeTensor kinds, bool is_causal,
            int64_t offset, int64_t precision, double softmax_scale, Tensor out, Tensor lse,
            Tensor pv_skips, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  AttendArgs a{};
  a.shape = {query.size(0), query.size(1), key.size(1),  query.size(2),
             key.size(2),   query.size(3), value.size(3)};
  a.tokens = mask_of(mask, kinds, is_causal, offset);
  take_scored(&a, query, key, q_scale, q_rows_per_scale, k_scale, k_rows_per_scale, precision,
              softmax_scale);
  a.value = rows_of(value);
  a.v_scale = data_of<float>(v_scale);
  a.lse_shift = data_of<float>(lse_shift);
  a.pv_skip = data_of<float>(pv_skip);
  a.counts = data_of<int32_t>(counts);
  a.indices = data_of<int32_t>(indices);
  a.out_dtype = dtype_of(out);
  STD_TORCH_CHECK(out.is_contiguous(), "sparge: a contiguous output is wanted");
  a.out = static_cast<char*>(out.data_ptr());
  a.lse = data_of<float>(lse);
  a.pv_skips = data_of<int32_t>(pv_skips);

  const Shape& s = a.shape;
  const int64_t heads = s.B * s.Hk, blocks = heads * s.n_k();
  std::vector<uint8_t> finite(static_cast<size_t>(blocks));
  std::vector<float> block_largest(static_cast<size_t>(blocks)),
      largest(static_cast<size_t>(heads)), factor(static_cast<size_t>(heads));
  std::vector<int32_t> sums(k.wants_code_sums(a) ? size_t(heads * s.Lk) : 0);
  int32_t* code_sums = sums.empty() ? nullptr : sums.data();
  run_tasks(k, blocks, 64, nullptr, [&](int64_t task, char*) {
    k.look_at_block(a, task, finite.data(), block_largest.data(), code_sums);
  });
  const double most = a.out_dtype == Dtype::f16    ? 65504.0
                      : a.out_dtype == Dtype::bf16 ? 3.3895313892515355e38
                                                   : 3.4028234663852886e38;
  for (int64_t i = 0; i < heads; ++i) {
    float x = 0.0f;
    for (int64_t j = 0; j < s.n_k(); ++j) x = std::max(x, block_largest[size_t(i * s.n_k() + j)]);
    factor[size_t(i)] = factor_for(x, s.Lk);
    largest[size_t(i)] = float(std::min(double(x), most));
  }
  a.finite = finite.data();
  a.largest = largest.data();
  a.v_factor = factor.data();
  a.code_sums = code_sums;
  Room tiles;
  if (const int64_t bytes = k.v_tile_bytes(a)) {
    tiles = make_room(size_t(bytes * blocks));
    STD_TORCH_CHECK(tiles, "sparge: no memory for transposed values, ", bytes * blocks, " bytes");
    a.v_tiles = tiles.get();
    a.v_tiles_block = bytes;
    run_tasks(k, blocks, 64, nullptr,
              [&](int64_t task, char*) { k.tile_value(a, task, tiles.get()); });
  }
  const int64_t n = s.B * s.Hq * s.n_q();
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
  BackwardArgs a{};
  a.shape = {query.size(0), query.size(1), key.size(1),  query.size(2),
             key.size(2),   query.size(3), value.size(3)};
  a.tokens = mask_of(mask, kinds, is_causal, offset);
  a.softmax_scale = softmax_scale;
  a.query = rows_of(query);
  a.key = rows_of(key);
  a.value = rows_of(value);
  a.grad_out = rows_of(grad_out);
  a.delta = data_of<float>(delta);
  a.pv_skip = data_of<float>(pv_skip);
  a.counts = data_of<int32_t>(counts);
  a.indices = data_of<int32_t>(indices);
  a.grad_query = data_of<float>(grad_query);
  a.grad_key = data_of<float>(grad_key);
  a.grad_value = data_of<float>(grad_value);
  const Shape& s = a.shape;
  const int64_t n = s.B * s.Hq * s.n_q(), n_k = s.n_k(), key_blocks = s.B * s.Hk * n_k;
  std::vector<float> shift(size_t(s.B * s.Hq * s.Lq)), row_sum(shift.size());
  std::vector<uint8_t> skipped(size_t(n * n_k));
  a.shift = shift.data();
  a.row_sum = row_sum.data();
  a.skipped = skipped.data();
  const std::vector<int64_t> order = long_lists_first(a.counts, n);
  run_tasks(k, n, k.backward_scratch(a), order.data(),
            [&](int64_t task, char* scratch) { k.backward_query(a, task, scratch); });

  // Who reads each key block, in the order of heads and query blocks: sums have one order.
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

STABLE_TORCH_LIBRARY(sparge_cpu, m) {
  m.def("available_isas() -> int");
  m.def("key_mean(Tensor key, Tensor(a!) mean, int isa) -> ()");
  m.def(
      "statistics(Tensor x, int block, Tensor? mean, Tensor(a!)? codes, Tensor(b!)? scale, "
      "Tensor(c!)? pooled, Tensor(d!)? similarity, Tensor? key_mean, float softmax_scale, "
      "Tensor(e!)? lse_shift, int isa) -> ()");
  m.def("channels(Tensor value, Tensor(a!) codes, Tensor(b!) scale, int isa) -> ()");
  m.def(
      "block_kinds(Tensor mask, int Lq, int Lk, bool is_causal, int offset, Tensor(a!) kinds, int "
      "isa) "
      "-> ()");
  m.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor? q_scale, int q_rows_per_scale, "
      "Tensor? k_scale, int k_rows_per_scale, Tensor? v_scale, Tensor? lse_shift, Tensor? pv_skip, "
      "Tensor counts, Tensor indices, Tensor? mask, Tensor? kinds, bool is_causal, int offset, "
      "int precision, float softmax_scale, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) pv_skips, "
      "int isa) -> ()");
  m.def(
      "backward(Tensor query, Tensor key, Tensor value, Tensor grad_out, Tensor delta, "
      "Tensor? pv_skip, Tensor counts, Tensor indices, Tensor? mask, Tensor? kinds, bool "
      "is_causal, "
      "int offset, float softmax_scale, Tensor(a!) grad_query, Tensor(b!) grad_key, "
      "Tensor(c!) grad_value, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CompositeExplicitAutograd, m) {
  m.impl("available_isas", TORCH_BOX(&available_isas));
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("key_mean", TORCH_BOX(&key_mean));
  m.impl("statistics", TORCH_BOX(&statistics));
  m.impl("channels", TORCH_BOX(&channels));
  m.impl("block_kinds", TORCH_BOX(&block_kinds));
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace sparge
