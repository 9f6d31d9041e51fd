// torch.ops.sparge_cpu.{available_isas, key_mean, statistics, channels, block_kinds}: what one pass
// over each input computes. In all ops the caller allocates the outputs.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "block_kinds.h"
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

// Mean of each head's rows, fp32. Threads sum blocks; the sums are added in order, in fp64.
void key_mean(const Tensor& key, Tensor mean, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Rows x = arguments.float_rows("key", key, {kAny, kAny, kAny, kAny});
  const int64_t B = key.size(0), H = key.size(1), L = key.size(2), D = key.size(3);
  float* out = arguments.write<float>("mean", mean, {B, H, D});
  const int64_t n = blocks_of(L, kBlockK);
  std::vector<float> sums(size_t(B * H * n * D));
  run_tasks(k, B * H * n, 64, nullptr, [&](int64_t task, char*) {
    const int64_t bh = task / n, start = task % n * kBlockK;
    k.sum_rows(x, bh / H, bh % H, start, std::min(start + kBlockK, L), D, &sums[size_t(task * D)]);
  });
  for (int64_t bh = 0; bh < B * H; ++bh)
    for (int64_t d = 0; d < D; ++d) {
      double total = 0.0;
      for (int64_t i = 0; i < n; ++i) total += double(sums[size_t((bh * n + i) * D + d)]);
      out[bh * D + d] = float(total * kBlockQ / double(L));  // rows were scaled by 1 / kBlockQ
    }
}

void statistics(const Tensor& x, int64_t block, MaybeTensor mean, MaybeTensor codes,
                MaybeTensor scale, MaybeTensor pooled, MaybeTensor similarity, MaybeTensor key_mean,
                double softmax_scale, MaybeTensor lse_shift, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  check_statistics(block, codes, scale, key_mean, lse_shift);
  Arguments arguments;
  StatisticsArgs a{};
  a.x = arguments.float_rows("x", x, {kAny, kAny, kAny, kAny});
  const int64_t B = x.size(0), n = blocks_of(x.size(2), block);
  a.H = x.size(1), a.L = x.size(2), a.D = x.size(3);
  a.block = int(block);
  a.mean = arguments.read<float>("mean", mean, {B, a.H, a.D});
  a.codes = arguments.write<int8_t>("codes", codes, {B, a.H, a.L, a.D});
  a.scale = arguments.write<float>("scale", scale, {B, a.H, a.L});
  a.pooled = arguments.write<float>("pooled", pooled, {B, a.H, n, a.D});
  a.similarity = arguments.write<float>("similarity", similarity, {B, a.H, n});
  a.key_mean = arguments.read<float>("key_mean", key_mean, {B, kAny, a.D});
  if (key_mean && a.H % key_mean->size(1))
    refuse("key_mean must have a number of heads that divides ", a.H, ", got ", key_mean->size(1));
  a.group = key_mean ? a.H / key_mean->size(1) : 1;
  a.softmax_scale = float(Arguments::finite("softmax_scale", softmax_scale));
  a.lse_shift = arguments.write<float>("lse_shift", lse_shift, {B, a.H, a.L});
  run_tasks(k, B * a.H * n, 64, nullptr, [&](int64_t task, char*) { k.statistics(a, task); });
}

void channels(const Tensor& value, Tensor codes, Tensor scale, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  ChannelArgs a{};
  a.value = arguments.float_rows("value", value, {kAny, kAny, kAny, kAny});
  const int64_t B = value.size(0), n = blocks_of(value.size(2), kBlockK);
  a.H = value.size(1), a.L = value.size(2), a.D = value.size(3);
  a.codes = arguments.write<int8_t>("codes", codes, {B, a.H, a.L, a.D});
  a.scale = arguments.write<float>("scale", scale, {B, a.H, n, a.D});
  run_tasks(k, B * a.H * n, 64, nullptr, [&](int64_t task, char*) { k.channels(a, task); });
}

void block_kinds(const Tensor& mask, int64_t Lq, int64_t Lk, bool is_causal, int64_t offset,
                 Tensor kinds, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  in_range("Lq", Lq, 1, kMaxLength);
  in_range("Lk", Lk, 1, kMaxLength);
  if (mask.dim() != 4) refuse("mask must have 4 dimensions, got ", text_of(mask));
  Arguments arguments;
  const int64_t B = mask.size(0), H = mask.size(1);
  TokenMask t = Arguments::diagonal(is_causal, offset);
  arguments.take_mask(&t, mask, {B, H, H, Lq, Lk, 1, 1});
  const int64_t n_q = blocks_of(Lq, kBlockQ), n_k = blocks_of(Lk, kBlockK);
  int8_t* out = arguments.write<int8_t>("kinds", kinds, {B, H, n_q, n_k});
  // Where all rows have the same mask, one row of blocks holds for all.
  const bool same = t.stride_q == 0 && !is_causal;
  const int64_t rows = same ? 1 : n_q;
  run_tasks(k, B * H * rows, 64, nullptr, [&](int64_t task, char*) {
    const int64_t bh = task / rows, i_q = task % rows;
    int8_t* row = out + (bh * n_q + i_q) * n_k;
    kinds_of_row(t, bh / H, bh % H, i_q, Lq, Lk, row);
    for (int64_t i = 1; same && i < n_q; ++i) std::copy(row, row + n_k, row + i * n_k);
  });
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
      "block_kinds(Tensor mask, int Lq, int Lk, bool is_causal, int offset, Tensor(a!) kinds, "
      "int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CompositeExplicitAutograd, m) {
  m.impl("available_isas", TORCH_BOX(&available_isas));
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("key_mean", TORCH_BOX(&key_mean));
  m.impl("statistics", TORCH_BOX(&statistics));
  m.impl("channels", TORCH_BOX(&channels));
  m.impl("block_kinds", TORCH_BOX(&block_kinds));
}

}  // namespace sparge
