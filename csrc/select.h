// Selection of the kept blocks of 16 query blocks of one head, from the mass map.
//
// Kept are the fewest blocks, largest mass first, whose mass reaches a share of the row's total,
// or a number of blocks. Ties break to the smaller index. Instead of sorting, a radix search over
// the bits of the masses finds the smallest mass that is kept.
#pragma once

#include "arena.h"
#include "predict.h"

namespace sparge {
namespace {

// Sets `kept` for the selected blocks, among the n blocks that may be attended. `mass` is finite
// and not negative.
inline void select_blocks(const float* mass, const uint8_t* may, int64_t n, Keep keep,
                          double amount, int64_t allowed, uint8_t* kept) {
  if (keep == Keep::mass && amount >= 1.0) {
    // Blocks of mass 0 count too: the whole mass needs every block.
    for (int64_t j = 0; j < n; ++j) kept[j] |= may[j];
    return;
  }
  double whole = 0.0;
  for (int64_t j = 0; j < n; ++j)
    if (may[j]) whole += double(mass[j]);
  // 0.7 · 10 is a little over 7 in binary; 7 is meant.
  const double product = amount * double(allowed) - 1e-9;
  const int64_t number = int64_t(std::ceil(product)) > 1 ? int64_t(std::ceil(product)) : 1;
  const double target = amount * whole;

  // The bits of floats that are not negative sort as the floats do.
  uint32_t prefix = 0, known = 0;
  double above = 0.0;  // mass of the blocks above the prefix
  int64_t above_count = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    double sums[256] = {};
    int32_t counts[256] = {};
    for (int64_t j = 0; j < n; ++j) {
      uint32_t bits;
      std::memcpy(&bits, mass + j, 4);
      if (!may[j] || (bits & known) != prefix) continue;
      sums[bits >> shift & 255] += double(mass[j]);
      ++counts[bits >> shift & 255];
    }
    int bucket = 255, lowest = -1;
    for (; bucket >= 0; --bucket) {
      if (!counts[bucket]) continue;
      lowest = bucket;
      const bool crosses = keep == Keep::mass ? above + sums[bucket] >= target
                                              : above_count + counts[bucket] >= number;
      if (crosses) break;
      above += sums[bucket];
      above_count += counts[bucket];
    }
    if (bucket < 0) {
      // Rounding left the sum just below the target: it ends in the last bucket.
      if (lowest < 0) return;
      bucket = lowest;
      above -= sums[bucket];
      above_count -= counts[bucket];
    }
    known |= 255u << shift;
    prefix |= uint32_t(bucket) << shift;
  }
  // All masses above the last one, and as many equal to it as are needed, smaller index first.
  float last;
  std::memcpy(&last, &prefix, 4);
  for (int64_t j = 0; j < n; ++j)
    if (may[j] && mass[j] > last) kept[j] = 1;
  for (int64_t j = 0; j < n; ++j) {
    if (!may[j] || mass[j] != last) continue;
    kept[j] = 1;
    above += double(last);
    ++above_count;
    if (keep == Keep::mass ? above >= target : above_count >= number) break;
  }
}

// For each of the n blocks that may be attended: the first of the ascending `masses` whose
// selection keeps it, or n_steps. `order` and `spare` have room for n numbers each.
inline void first_steps(const float* mass, const uint8_t* may, int64_t n, const double* masses,
                        int n_steps, int32_t* order, int32_t* spare, int32_t* out) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j)
    if (may[j]) order[count++] = int32_t(j);
  // A radix sort, largest first; each pass is stable.
  for (int shift = 0; shift < 32; shift += 8) {
    int32_t starts[257] = {};
    auto bucket = [&](int32_t j) {
      uint32_t bits;
      std::memcpy(&bits, mass + j, 4);
      return 255 - int(bits >> shift & 255);
    };
    for (int64_t i = 0; i < count; ++i) ++starts[bucket(order[i]) + 1];
    for (int i = 0; i < 256; ++i) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < count; ++i) spare[starts[bucket(order[i])]++] = order[i];
    int32_t* swapped = order;
    order = spare;
    spare = swapped;
  }
  double whole = 0.0, before = 0.0;
  for (int64_t i = 0; i < count; ++i) whole += double(mass[order[i]]);
  int step = 0;
  for (int64_t i = 0; i < count; ++i) {
    while (i && step < n_steps && before >= masses[step] * whole) ++step;
    out[order[i]] = step;
    before += double(mass[order[i]]);
  }
}

struct Selection {
  const SelectArgs& a;
  const Shape& s;
  int64_t b, h, first, n_blocks, n_k;
  // In the thread's scratch, [n_k] each.
  uint8_t *may, *kept;
  int32_t *order, *spare;  // Keep::error only
  size_t scratch_bytes;

  Selection(const SelectArgs& args, int64_t task, char* scratch) : a(args), s(args.shape) {
    const int64_t per_head = (s.n_q() + kBlocksPerTask - 1) / kBlocksPerTask;
    first = task % per_head * kBlocksPerTask;
    h = task / per_head % s.Hq;
    b = task / per_head / s.Hq;
    n_blocks = s.n_q() - first < kBlocksPerTask ? s.n_q() - first : kBlocksPerTask;
    n_k = s.n_k();
    Arena arena{scratch};
    may = arena.take<uint8_t>(size_t(n_k));
    kept = arena.take<uint8_t>(size_t(n_k));
    order = arena.take<int32_t>(a.keep == Keep::error ? size_t(n_k) : 0);
    spare = arena.take<int32_t>(a.keep == Keep::error ? size_t(n_k) : 0);
    scratch_bytes = arena.used;
  }

  void select_row(int64_t i_q) {
    const int64_t row = (b * s.Hq + h) * s.n_q() + i_q;
    int64_t allowed = 0;
    for (int64_t j = 0; j < n_k; ++j) {
      may[j] = a.tokens.kind(s, b, h, i_q, j) != kExcluded;
      allowed += may[j];
    }
    a.allowed[row] = int32_t(allowed);
    const float* mass = a.mass ? a.mass + (row - a.mass_start) * n_k : nullptr;
    const bool everything =
        a.keep == Keep::all || !predicts(mass) || !a.similarity.trusts_row(s, b, h, i_q);
    if (a.keep == Keep::error)
      write_steps(i_q, row, mass, everything);
    else
      write_list(i_q, row, mass, allowed, everything);
  }

  // Whether a row of masses can be selected from: all finite and not negative, and some above 0.
  bool predicts(const float* mass) const {
    bool valid = true, some = false;
    for (int64_t j = 0; j < n_k; ++j) {
      uint32_t bits;
      std::memcpy(&bits, mass + j, 4);
      valid &= bits < 0x7f800000u;
      some |= mass[j] > 0.0f;
    }
    return valid && some;
  }

  void write_list(int64_t i_q, int64_t row, const float* mass, int64_t allowed, bool everything) {
    std::memset(kept, 0, size_t(n_k));
    if (!everything) select_blocks(mass, may, n_k, a.keep, a.amount[h], allowed, kept);
    int32_t* out = a.indices + row * n_k;
    int32_t n = 0;
    for (int64_t j = 0; j < n_k; ++j) {
      const bool keeps = everything || kept[j] || a.forced[(i_q - a.forced_start) * n_k + j] ||
                         !a.similarity.trusts_column(s, b, h, j);
      if (keeps && may[j]) out[n++] = int32_t(j);
    }
    a.counts[row] = n;
    for (int64_t j = n; j < n_k; ++j) out[j] = -1;
  }

  void write_steps(int64_t i_q, int64_t row, const float* mass, bool everything) {
    int32_t* out = a.indices + row * n_k;
    if (!everything) first_steps(mass, may, n_k, a.masses, a.n_steps, order, spare, out);
    for (int64_t j = 0; j < n_k; ++j)
      out[j] = !may[j] ? -1 : everything || a.forced[(i_q - a.forced_start) * n_k + j] ? 0 : out[j];
  }

  void run() {
    for (int64_t i = 0; i < n_blocks; ++i) select_row(first + i);
  }
};

}  // namespace
}  // namespace sparge
