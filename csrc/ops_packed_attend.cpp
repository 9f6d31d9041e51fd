// torch.ops.sparge_cpu.packed_attend: the op `attend` for packed sequences.
//
// Tables and lists are those of ops_packed_plan.cpp. The output is packed as the caller's tensors
// are, out [T, Hq, Dv] and lse [Hq, T]; `attends` [n] may leave sequences out, whose rows are then
// not written.
#include <torch/csrc/stable/library.h>

#include <atomic>

#include "attend_checks.h"
#include "pack.h"

namespace sparge {
namespace {

// The arguments of each sequence that attends, and what is known of its K and V.
struct Attending {
  std::vector<AttendArgs> each;
  std::vector<int64_t> which;  // sequences that attend
  int64_t Hk = 0;
  std::vector<int64_t> k_blocks, rows_before;  // [n + 1]
  std::vector<uint8_t> finite;
  std::vector<float> of_blocks;
  std::vector<int32_t> code_sums;
  Buffer tiles;

  std::vector<Piece> key_blocks() const {
    std::vector<Piece> pieces;
    for (const int64_t i : which)
      for (int64_t task = 0; task < Hk * each[size_t(i)].shape.n_k(); ++task)
        pieces.push_back({i, task, 0});
    return pieces;
  }
  void find_facts(const Kernels& k) {
    const AttendArgs& any = each[size_t(which[0])];
    finite.resize(size_t(k_blocks.back() * Hk));
    of_blocks.resize(finite.size());
    code_sums.resize(k.needs_code_sums(any) ? size_t(rows_before.back() * Hk) : 0);
    int32_t* sums = code_sums.empty() ? nullptr : code_sums.data();
    run_pack(k, key_blocks(), 64, [&](int64_t i, int64_t task, char*) {
      k.find_kv_facts(each[size_t(i)], task, part_of(finite.data(), k_blocks, i, Hk),
                      part_of(of_blocks.data(), k_blocks, i, Hk),
                      part_of(sums, rows_before, i, Hk));
    });
    for (const int64_t i : which) {
      AttendArgs& own = each[size_t(i)];
      own.finite = part_of(finite.data(), k_blocks, i, Hk);
      own.code_sums = part_of(sums, rows_before, i, Hk);
    }
  }
  void transpose_values(const Kernels& k) {
    const int64_t bytes = k.v_tile_bytes(each[size_t(which[0])]);
    if (!bytes) return;
    const int64_t all = k_blocks.back() * Hk * bytes;
    tiles = allocate(size_t(all));
    if (!tiles) refuse("no memory for transposed values, ", all, " bytes");
    for (const int64_t i : which) {
      each[size_t(i)].v_tiles = part_of(tiles.get(), k_blocks, i, Hk * bytes);
      each[size_t(i)].v_tiles_block = bytes;
    }
    run_pack(k, key_blocks(), 64, [&](int64_t i, int64_t task, char*) {
      k.transpose_value(each[size_t(i)], task, part_of(tiles.get(), k_blocks, i, Hk * bytes));
    });
  }
};

// Every list of the sequences that attend holds its count of key blocks, ascending.
void check_all_lists(const Kernels& k, const Attending& x) {
  std::atomic<int64_t> bad{-1};
  run_tasks(k, int64_t(x.which.size()), 64, nullptr, [&](int64_t at, char*) {
    const AttendArgs& a = x.each[size_t(x.which[size_t(at)])];
    const int64_t n_k = a.shape.n_k();
    for (int64_t i = 0; i < a.shape.Hq * a.shape.n_q(); ++i)
      if (!is_list(a.counts[i], a.indices + i * n_k, n_k)) bad = x.which[size_t(at)];
  });
  if (bad >= 0)
    refuse("counts and indices must be lists of ascending key blocks; sequence ", bad.load(),
           " has one that is not");
}

// The pooled entries of each sequence, in the place of its keys.
Attending pooled_entries(Arguments* arguments, const Pack& pack, const Attending& own,
                         const MaybeTensor& key, const MaybeTensor& value,
                         const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t group) {
  const AttendArgs& any = own.each[size_t(own.which[0])];
  const Shape& s = any.shape;
  if (!value) refuse("pooled_value is needed with pooled_key");
  in_range("pool_group", group, 1, kBlockK);
  if (kBlockK % group) refuse("pool_group must divide ", kBlockK, ", got ", group);
  Attending x;
  x.which = own.which, x.Hk = own.Hk;
  x.rows_before = pack.k.blocks_before(group);
  const int64_t n = x.rows_before.back();
  auto entries = [&](int64_t i) { return x.rows_before[size_t(i + 1)] - x.rows_before[size_t(i)]; };
  x.k_blocks =
      sums_before(pack.n(), "blocks", [&](int64_t i) { return blocks_of(entries(i), kBlockK); });
  const Rows keys = arguments->contiguous_rows("pooled_key", *key, {n, s.Hk, s.D});
  const Rows values = arguments->contiguous_rows("pooled_value", *value, {n, s.Hk, s.Dv});
  AttendArgs first{};
  first.key = keys, first.value = values;
  const float* k_scales =
      arguments->row_scales("pooled_k_scale", k_scale, keys.dtype == Dtype::i8, {n, s.Hk});
  first.v_scale =
      arguments->read<float>("pooled_v_scale", v_scale, {x.k_blocks.back(), s.Hk, s.Dv});
  check_pooled(any, first);
  auto of = [&](const Rows& all, int64_t i, int64_t D, int64_t bytes) {
    Rows r = all;
    r.data += x.rows_before[size_t(i)] * s.Hk * D * bytes;
    r.stride_d = bytes, r.stride_l = D * bytes, r.stride_h = entries(i) * r.stride_l;
    return r;
  };
  x.each.resize(size_t(pack.n()));
  for (const int64_t i : x.which) {
    AttendArgs& a = x.each[size_t(i)];
    a.precision = any.precision;
    a.shape = own.each[size_t(i)].shape;
    a.shape.Lk = entries(i);
    a.key = of(keys, i, s.D, int64_t(key->element_size()));
    a.value = of(values, i, s.Dv, int64_t(value->element_size()));
    a.k_scale = {part_of(k_scales, x.rows_before, i, s.Hk), entries(i), 1};
    a.v_scale = part_of(first.v_scale, x.k_blocks, i, s.Hk * s.Dv);
    // Means are no larger than what they are means of, so the factor of V holds for them too.
    a.v_factor = own.each[size_t(i)].v_factor;
  }
  return x;
}

void packed_attend(const Tensor& query, const Tensor& key, const Tensor& value, MaybeTensor q_scale,
                   MaybeTensor k_scale, MaybeTensor v_scale, MaybeTensor pooled_key,
                   MaybeTensor pooled_value, MaybeTensor pooled_k_scale, MaybeTensor pooled_v_scale,
                   int64_t pool_group, MaybeTensor lse_shift, MaybeTensor pv_skip,
                   const Tensor& counts, const Tensor& indices, const Tensor& q_rows,
                   const Tensor& k_rows, const Tensor& offsets, bool is_causal, MaybeTensor attends,
                   int64_t precision, double softmax_scale, Tensor out, Tensor lse, Tensor pv_skips,
                   int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Pack pack(&arguments, q_rows, k_rows, offsets, is_causal);
  const PackedScores scored = PackedScores::read(&arguments, pack, query, key, q_scale, k_scale,
                                                 precision, softmax_scale, true);
  const int64_t Hq = scored.query.H, Hk = scored.key.H, n_q = pack.q_blocks.back();
  const PackedRows values = PackedRows::read(&arguments, "value", value, Hk, kAny, pack.k);
  const int64_t Dv = values.D;
  AttendArgs a{};
  a.precision = scored.precision, a.key = scored.key.all, a.value = values.all;
  a.v_scale = arguments.read<float>("v_scale", v_scale, {pack.k_blocks.back(), Hk, Dv});
  check_value(a);
  a.lse_shift = arguments.read<float>("lse_shift", lse_shift, {pack.q.total(), Hq});
  a.pv_skip = arguments.read<float>("pv_skip", pv_skip, {Hq});
  a.counts = arguments.read<int32_t>("counts", counts, {n_q, Hq});
  a.indices = arguments.read<int32_t>("indices", indices, {pack.pairs.back(), Hq});
  a.out = arguments.write_floats("out", out, {kAny, Hq, Dv}, &a.out_dtype);
  pack.q.check_within("out", out.size(0));
  pack.q.check_apart();
  a.out_stride_h = Dv * int64_t(out.element_size());
  a.out_stride_l = Hq * a.out_stride_h;
  a.lse = arguments.write<float>("lse", lse, {Hq, out.size(0)});
  a.lse_stride_h = out.size(0);
  a.pv_skips = arguments.write<int32_t>("pv_skips", pv_skips, {n_q, Hq});
  const bool* chosen = arguments.read<bool>("attends", attends, {pack.n()});

  Attending all;
  all.Hk = Hk, all.k_blocks = pack.k_blocks, all.rows_before = pack.k.before;
  all.each.assign(size_t(pack.n()), a);
  std::vector<float> largest(size_t(pack.n() * Hk)), factor(largest.size());
  for (int64_t i = 0; i < pack.n(); ++i) {
    AttendArgs& own = all.each[size_t(i)];
    scored.fill(&own, pack, i, Dv);
    own.value = values.of(pack.k, i);
    own.v_scale = part_of(a.v_scale, pack.k_blocks, i, Hk * Dv);
    own.lse_shift = part_of(a.lse_shift, pack.q.before, i, Hq);
    own.counts = part_of(a.counts, pack.q_blocks, i, Hq);
    own.indices = part_of(a.indices, pack.pairs, i, Hq);
    own.pv_skips = part_of(a.pv_skips, pack.q_blocks, i, Hq);
    own.out += pack.q.start(i) * a.out_stride_l;
    own.lse += pack.q.start(i);
    own.largest = largest.data() + i * Hk;
    own.v_factor = factor.data() + i * Hk;
    if (!chosen || chosen[i]) all.which.push_back(i);
  }
  if (!pooled_key && (pooled_value || pooled_k_scale || pooled_v_scale))
    refuse("pooled_key is needed with pooled_value and its scales");
  if (all.which.empty()) return;
  check_all_lists(k, all);
  Attending pooled;
  if (pooled_key)
    pooled = pooled_entries(&arguments, pack, all, pooled_key, pooled_value, pooled_k_scale,
                            pooled_v_scale, pool_group);
  all.find_facts(k);
  run_tasks(k, int64_t(all.which.size()), 64, nullptr, [&](int64_t at, char*) {
    const int64_t i = all.which[size_t(at)];
    bound_values(all.each[size_t(i)], part_of(all.of_blocks.data(), pack.k_blocks, i, Hk),
                 largest.data() + i * Hk, factor.data() + i * Hk);
  });
  all.transpose_values(k);
  if (pooled_key) {
    pooled.find_facts(k);
    pooled.transpose_values(k);
  }
  size_t scratch = 0;
  std::vector<Piece> pieces;
  for (const int64_t i : all.which) {
    AttendArgs& own = all.each[size_t(i)];
    if (pooled_key) own.pooled = &pooled.each[size_t(i)], own.pool_group = int(pool_group);
    scratch = std::max(scratch, k.attend_scratch(own));
    for (int64_t task = 0; task < Hq * pack.n_q(i); ++task)
      pieces.push_back({i, task, own.counts[task]});
  }
  costly_first(&pieces, pack.n());
  run_pack(k, pieces, scratch, [&](int64_t i, int64_t task, char* buffer) {
    k.attend(all.each[size_t(i)], task, buffer);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "packed_attend(Tensor query, Tensor key, Tensor value, Tensor? q_scale, Tensor? k_scale, "
      "Tensor? v_scale, Tensor? pooled_key, Tensor? pooled_value, Tensor? pooled_k_scale, "
      "Tensor? pooled_v_scale, int pool_group, Tensor? lse_shift, Tensor? pv_skip, Tensor counts, "
      "Tensor indices, Tensor q_rows, Tensor k_rows, Tensor offsets, bool is_causal, "
      "Tensor? attends, int precision, float softmax_scale, Tensor(a!) out, Tensor(b!) lse, "
      "Tensor(c!) pv_skips, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("packed_attend", TORCH_BOX(&packed_attend));
}

}  // namespace sparge
