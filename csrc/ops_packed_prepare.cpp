// torch.ops.sparge_cpu.packed_{key_mean, statistics, channels}: the ops of ops_prepare.cpp for
// packed sequences. `rows` [n, 2] has the first row and the number of rows of each sequence in x;
// an x in the order of the pack (pack.h) is read in that order.
#include <torch/csrc/stable/library.h>

#include "pack.h"

namespace sparge {
namespace {

// Mean of the rows of each sequence and head [n, H, D], added as `key_mean` adds them.
void packed_key_mean(const Tensor& key, const Tensor& rows, Tensor mean, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Sequences of(&arguments, "rows", rows);
  const PackedRows x = PackedRows::read(&arguments, "key", key, kAny, kAny, of);
  check_floats("key", x.all);
  float* out = arguments.write<float>("mean", mean, {of.n, x.H, x.D});
  const std::vector<int64_t> blocks = of.blocks_before(kBlockK);
  std::vector<float> sums(size_t(blocks.back() * x.H * x.D));
  auto number = [&](int64_t i) { return blocks[size_t(i + 1)] - blocks[size_t(i)]; };
  auto sums_of = [&](int64_t i, int64_t task) {
    return &sums[size_t((blocks[size_t(i)] * x.H + task) * x.D)];
  };
  run_pack(k, pieces_of(of.n, [&](int64_t i) { return x.H * number(i); }), 64,
           [&](int64_t i, int64_t task, char*) {
             const int64_t n = number(i), start = task % n * kBlockK;
             k.sum_rows(x.of(of, i), 0, task / n, start, std::min(start + kBlockK, of.length(i)),
                        x.D, sums_of(i, task));
           });
  run_tasks(k, of.n * x.H, 64, nullptr, [&](int64_t head, char*) {
    const int64_t i = head / x.H, n = number(i);
    for (int64_t d = 0; d < x.D; ++d) {
      double total = 0.0;
      for (int64_t j = 0; j < n; ++j) total += double(sums_of(i, head % x.H * n + j)[d]);
      out[head * x.D + d] = float(total * kBlockQ / double(of.length(i)));  // as in `key_mean`
    }
  });
}

void packed_statistics(const Tensor& x, const Tensor& rows, int64_t block, MaybeTensor mean,
                       MaybeTensor codes, MaybeTensor scale, MaybeTensor pooled,
                       MaybeTensor similarity, MaybeTensor key_mean, double softmax_scale,
                       MaybeTensor lse_shift, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  check_statistics(block, codes, scale, key_mean, lse_shift);
  Arguments arguments;
  const Sequences of(&arguments, "rows", rows);
  const PackedRows all = PackedRows::read(&arguments, "x", x, kAny, kAny, of);
  check_floats("x", all.all);
  const std::vector<int64_t> blocks = of.blocks_before(block);
  const int64_t H = all.H, D = all.D;
  StatisticsArgs a{};
  a.H = H, a.D = D, a.block = int(block);
  a.mean = arguments.read<float>("mean", mean, {of.n, H, D});
  a.codes = arguments.write<int8_t>("codes", codes, {of.total(), H, D});
  a.scale = arguments.write<float>("scale", scale, {of.total(), H});
  a.pooled = arguments.write<float>("pooled", pooled, {blocks.back(), H, D});
  a.similarity = arguments.write<float>("similarity", similarity, {blocks.back(), H});
  a.key_mean = arguments.read<float>("key_mean", key_mean, {of.n, kAny, D});
  const int64_t Hk = key_mean ? key_mean->size(1) : H;
  if (H % Hk) refuse("key_mean must have a number of heads that divides ", H, ", got ", Hk);
  a.group = H / Hk;
  a.softmax_scale = float(Arguments::finite("softmax_scale", softmax_scale));
  a.lse_shift = arguments.write<float>("lse_shift", lse_shift, {of.total(), H});
  std::vector<StatisticsArgs> each(size_t(of.n), a);
  for (int64_t i = 0; i < of.n; ++i) {
    StatisticsArgs& own = each[size_t(i)];
    own.x = all.of(of, i);
    own.L = of.length(i);
    own.mean = a.mean ? a.mean + i * H * D : nullptr;
    own.codes = part_of(a.codes, of.before, i, H * D);
    own.scale = part_of(a.scale, of.before, i, H);
    own.pooled = part_of(a.pooled, blocks, i, H * D);
    own.similarity = part_of(a.similarity, blocks, i, H);
    own.key_mean = a.key_mean ? a.key_mean + i * Hk * D : nullptr;
    own.lse_shift = part_of(a.lse_shift, of.before, i, H);
  }
  auto tasks = [&](int64_t i) { return H * (blocks[size_t(i + 1)] - blocks[size_t(i)]); };
  run_pack(k, pieces_of(of.n, tasks), 64,
           [&](int64_t i, int64_t task, char*) { k.statistics(each[size_t(i)], task); });
}

void packed_channels(const Tensor& value, const Tensor& rows, Tensor codes, Tensor scale,
                     int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Sequences of(&arguments, "rows", rows);
  const PackedRows all = PackedRows::read(&arguments, "value", value, kAny, kAny, of);
  check_floats("value", all.all);
  const std::vector<int64_t> blocks = of.blocks_before(kBlockK);
  const int64_t H = all.H, D = all.D;
  int8_t* out = arguments.write<int8_t>("codes", codes, {of.total(), H, D});
  float* scales = arguments.write<float>("scale", scale, {blocks.back(), H, D});
  auto tasks = [&](int64_t i) { return H * (blocks[size_t(i + 1)] - blocks[size_t(i)]); };
  run_pack(k, pieces_of(of.n, tasks), 64, [&](int64_t i, int64_t task, char*) {
    ChannelArgs a{all.of(of, i),
                  H,
                  of.length(i),
                  D,
                  part_of(out, of.before, i, H * D),
                  part_of(scales, blocks, i, H * D)};
    k.channels(a, task);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def("packed_key_mean(Tensor key, Tensor rows, Tensor(a!) mean, int isa) -> ()");
  m.def(
      "packed_statistics(Tensor x, Tensor rows, int block, Tensor? mean, Tensor(a!)? codes, "
      "Tensor(b!)? scale, Tensor(c!)? pooled, Tensor(d!)? similarity, Tensor? key_mean, "
      "float softmax_scale, Tensor(e!)? lse_shift, int isa) -> ()");
  m.def(
      "packed_channels(Tensor value, Tensor rows, Tensor(a!) codes, Tensor(b!) scale, int isa) "
      "-> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("packed_key_mean", TORCH_BOX(&packed_key_mean));
  m.impl("packed_statistics", TORCH_BOX(&packed_statistics));
  m.impl("packed_channels", TORCH_BOX(&packed_channels));
}

}  // namespace sparge
