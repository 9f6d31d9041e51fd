// Which blocks of a row are kept: the fewest, largest first, whose mass reaches a share of the
// whole, or a number of them. Ties break to the smaller index. No sort: a radix walk over the bits
// of the masses finds the smallest one that is kept.
#pragma once

#include <cstdint>
#include <cstring>

namespace sparge {
namespace {

// Marks in `kept` the chosen of the n blocks that may be attended. `mass` is finite and >= 0.
inline void select_blocks(const float* mass, const uint8_t* may, int64_t n, Keep keep,
                          double amount, int64_t allowed, uint8_t* kept) {
  if (keep == Keep::mass && amount >= 1.0) {
    // No mass is nothing, however small: the whole of it takes every block.
    for (int64_t j = 0; j < n; ++j) kept[j] |= may[j];
    return;
  }
  double whole = 0.0;
  for (int64_t j = 0; j < n; ++j)
    if (may[j]) whole += double(mass[j]);
  // 0.7 · 10 is a little over 7 in binary; a person means 7.
  const double product = amount * double(allowed) - 1e-9;
  const int64_t number = int64_t(std::ceil(product)) > 1 ? int64_t(std::ceil(product)) : 1;
  const double target = amount * whole;

  // Bits of floats that are not negative sort as the floats do.
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
      // Rounding kept the sum a hair below the target: the last bucket is where it ends.
      if (lowest < 0) return;
      bucket = lowest;
      above -= sums[bucket];
      above_count -= counts[bucket];
    }
    known |= 255u << shift;
    prefix |= uint32_t(bucket) << shift;
  }
  // Everything above the last mass, and as many equal to it as are needed, smaller index first.
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

// The first of the rising `masses` whose selection keeps a block, for the n blocks that may be
// attended; n_steps where none does. `order` and `spare` have room for n numbers each.
inline void first_steps(const float* mass, const uint8_t* may, int64_t n, const double* masses,
                        int n_steps, int32_t* order, int32_t* spare, int32_t* out) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j)
    if (may[j]) order[count++] = int32_t(j);
  // Sorted byte by byte, largest first; each pass keeps the order of equals.
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

}  // namespace
}  // namespace sparge
