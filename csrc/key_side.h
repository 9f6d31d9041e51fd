// Keys and values as attention reads them in one precision, beside their codes: facts of blocks,
// transposed values, pooled entries. A call has one side, and a second one where an error budget
// may raise heads to the caller's own precision.
#pragma once

#include <algorithm>
#include <cmath>

#include "arch/scalar.h"
#include "arena.h"
#include "work.h"

namespace sparge {
namespace {

inline int64_t blocks_in(int64_t length, int64_t block) { return (length + block - 1) / block; }

// The power of two that V is multiplied by: 1, unless sums of the largest |v| would overflow, or
// all of V is so small that products which flush subnormal numbers would lose it.
inline float factor_for(float largest, int64_t Lk) {
  const int bits = int(std::ceil(std::log2(double(Lk))));
  if (largest >= std::ldexp(1.0f, 126 - 6 - bits)) return std::ldexp(1.0f, -8 - bits);
  if (largest > 0.0f && largest < 0x1p-64f) return 0x1p63f;
  return 1.0f;
}

inline Rows contiguous(const void* data, Dtype dtype, int64_t H, int64_t L, int64_t D) {
  const int64_t size = dtype == Dtype::i8 ? 1 : dtype == Dtype::f32 ? 4 : 2;
  Rows r;
  r.data = static_cast<const char*>(data);
  r.dtype = dtype;
  r.stride_d = size, r.stride_l = D * size, r.stride_h = L * r.stride_l,
  r.stride_b = H * r.stride_h;
  return r;
}

class KeySide {
 public:
  AttendArgs args{}, entries{};
  float* entry_numbers = nullptr;  // values of entries as an error budget reads them, fp32

  KeySide(const Kernels& kernels, const Work& work) : k(kernels), w(work), s(work.shape) {
    heads = s.B * s.Hk, n_k = s.n_k();
  }
  KeySide(const KeySide&) = delete;

  int64_t entry_blocks() const { return args.pooled ? entries.shape.n_k() : 0; }
  int64_t tile_blocks() const { return tiles ? n_k : 0; }

  // Pooled entries, which stand for the keys that a precision reads: less `mean`, where it is
  // given. `known` are means of whole blocks that prediction reads. `made` says whether entries
  // are computed or given.
  void lay_out_entries(Arena* arena, const Places& p, bool made, const float* mean,
                       const float* known) {
    const bool fast = args.precision == Precision::int8_fast;
    const bool coded = fast || args.precision == Precision::int8;
    const Dtype dtype = args.precision == Precision::exact ? Dtype::f32 : w.value.dtype;
    const int64_t n = blocks_in(s.Lk, w.pool_group), size = dtype == Dtype::f32 ? 4 : 2;
    args.pooled = &entries;
    args.pool_group = w.pool_group;
    entries.precision = args.precision;
    entries.shape = s;
    entries.shape.Lk = n;
    makes_entries = made;
    casts = dtype != Dtype::f32;
    known_k = known;
    // Where the precision reads means as they are, they are computed where they are read.
    auto floats = [&](char* given, bool as_they_are, int64_t D) {
      float* own = as_they_are ? reinterpret_cast<float*>(given) : nullptr;
      return placed(arena, own, made, heads * n * D);
    };
    means_v = floats(p.entry_value, !fast && !casts, s.Dv);
    means_k = floats(p.entry_key, !coded && !casts, s.D);
    if (made) {
      pooled_v = {w.value, s.Hk, s.Lk, s.Dv, w.pool_group};
      pooled_k = {w.key, s.Hk, s.Lk, s.D, w.pool_group};
      pooled_v.pooled = means_v;
      pooled_k.pooled = known ? nullptr : means_k;
      pooled_k.mean = coded ? mean : nullptr;
    }
    char* value = fast || casts ? placed(arena, p.entry_value, made, heads * n * s.Dv * size)
                                : reinterpret_cast<char*>(means_v);
    char* key = coded || casts ? placed(arena, p.entry_key, made, heads * n * s.D * size)
                               : reinterpret_cast<char*>(means_k);
    entries.value = contiguous(value, fast ? Dtype::i8 : dtype, s.Hk, n, s.Dv);
    entries.key = contiguous(key, coded ? Dtype::i8 : dtype, s.Hk, n, s.D);
    if (fast) {
      float* scale = placed(arena, p.entry_v_scale, made, heads * entries.shape.n_k() * s.Dv);
      entries.v_scale = scale;
      entry_values = {contiguous(means_v, Dtype::f32, s.Hk, n, s.Dv), s.Hk, n, s.Dv};
      entry_values.codes = reinterpret_cast<int8_t*>(value);
      entry_values.scale = scale;
      if (w.keep == Keep::error && w.runs(Stage::select))
        entry_numbers = placed(arena, means_v, true, heads * n * s.Dv);
    }
    if (coded) {
      float* scale = placed(arena, p.entry_k_scale, made, heads * n);
      entries.k_scale = {scale, n};
      entry_codes = {contiguous(means_k, Dtype::f32, s.Hk, n, s.D), s.Hk, n, s.D, kBlockK};
      entry_codes.codes = reinterpret_cast<int8_t*>(key);
      entry_codes.scale = scale;
    }
  }

  // What attention must know of blocks.
  void lay_out_facts(Arena* arena) {
    largest = arena->take<float>(size_t(heads)), factor = arena->take<float>(size_t(heads));
    args.largest = largest;
    take_facts(arena, &args, &facts, &tiles);
    args.finite = facts.finite;
    if (args.pooled) take_facts(arena, &entries, &entry_facts, &entry_tiles);
  }

  void find_facts(int64_t block) const {
    if (facts.finite) k.find_kv_facts(args, block, facts.finite, facts.largest, facts.code_sums);
  }
  // Group means of key block j of key head g.
  void pool_block(int64_t g, int64_t j) const {
    if (!makes_entries) return;
    const int64_t n = entries.shape.Lk, per_block = kBlockK / w.pool_group;
    for (int64_t e = j * per_block; e < std::min((j + 1) * per_block, n); ++e) {
      k.statistics(pooled_v, g * n + e);
      if (!known_k) k.statistics(pooled_k, g * n + e);
    }
  }
  // The bound of the outputs of a key head, and the factor of its values.
  void bound(int64_t g) const {
    if (!facts.finite) return;
    const double most = args.out_dtype == Dtype::f16    ? 65504.0
                        : args.out_dtype == Dtype::bf16 ? 3.3895313892515355e38
                                                        : 3.4028234663852886e38;
    float x = 0.0f;
    for (int64_t j = 0; j < n_k; ++j) x = std::max(x, facts.largest[g * n_k + j]);
    factor[g] = factor_for(x, s.Lk);
    largest[g] = float(std::min(double(x), most));
  }
  // 64 pooled entries, as the precision holds keys and values, and their facts.
  void finish_entries(int64_t g, int64_t i) const {
    const int64_t n = entries.shape.Lk, first = g * n + i * kBlockK;
    const int64_t rows = std::min<int64_t>(n - i * kBlockK, kBlockK);
    const int64_t block = g * entries.shape.n_k() + i;
    if (makes_entries) {
      make_finite(means_v + first * s.Dv, means_v + first * s.Dv, rows * s.Dv);
      make_finite(means_k + first * s.D, (known_k ? known_k : means_k) + first * s.D, rows * s.D);
      if (entry_values.codes)
        k.channels(entry_values, block);
      else if (casts)
        cast(entries.value, means_v, first * s.Dv, rows * s.Dv);
      if (entry_codes.codes)
        k.statistics(entry_codes, block);
      else if (casts)
        cast(entries.key, means_k, first * s.D, rows * s.D);
    }
    if (entry_numbers)
      for (int64_t e = first * s.Dv; e < (first + rows) * s.Dv; ++e)
        entry_numbers[e] =
            float(entry_values.codes[e]) * entry_values.scale[block * s.Dv + e % s.Dv];
    if (!entry_facts.finite) return;
    k.find_kv_facts(entries, block, entry_facts.finite, entry_facts.largest, entry_facts.code_sums);
    if (entry_tiles) k.transpose_value(entries, block, entry_tiles);
  }
  void transpose(int64_t block) const { k.transpose_value(args, block, tiles); }

 private:
  struct Facts {
    uint8_t* finite = nullptr;
    float* largest = nullptr;
    int32_t* code_sums = nullptr;
  };
  const Kernels& k;
  const Work& w;
  const Shape& s;
  int64_t heads, n_k;
  StatisticsArgs pooled_v{}, pooled_k{}, entry_codes{};
  ChannelArgs entry_values{};
  bool makes_entries = false, casts = false;
  const float* known_k = nullptr;
  float *means_v = nullptr, *means_k = nullptr, *largest = nullptr, *factor = nullptr;
  Facts facts, entry_facts;
  char *tiles = nullptr, *entry_tiles = nullptr;

  void take_facts(Arena* arena, AttendArgs* x, Facts* f, char** to_tiles) {
    const int64_t blocks = heads * x->shape.n_k();
    f->finite = arena->take<uint8_t>(size_t(blocks));
    f->largest = arena->take<float>(size_t(blocks));
    if (k.needs_code_sums(*x)) f->code_sums = arena->take<int32_t>(size_t(heads * x->shape.Lk));
    x->code_sums = f->code_sums;
    x->v_tiles_block = k.v_tile_bytes(*x);
    if (x->v_tiles_block) *to_tiles = arena->take<char>(size_t(blocks * x->v_tiles_block));
    x->v_tiles = *to_tiles;
    x->v_factor = factor;  // means are no larger than what they are means of
  }
  // Means that are not finite are 0: their block is known not to be finite by its own numbers.
  static void make_finite(float* x, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) x[i] = std::fabs(from[i]) < INFINITY ? from[i] : 0.0f;
  }
  static void cast(const Rows& to, const float* from, int64_t first, int64_t n) {
    uint16_t* x = reinterpret_cast<uint16_t*>(const_cast<char*>(to.data));
    for (int64_t i = first; i < first + n; ++i)
      x[i] = to.dtype == Dtype::bf16 ? to_bf16(from[i]) : to_f16(from[i]);
  }
};

}  // namespace
}  // namespace sparge
