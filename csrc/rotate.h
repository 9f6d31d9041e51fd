// The rotation of q and k before they are coded: a Hadamard transform after a change of signs.
//
//   y = H · diag(sign) · x,   sign of channel d = (-1)^(pairs of adjacent ones in the bits of d)
//
// It is orthogonal, so scores do not change, and it spreads one large channel over all of them. The
// signs (the Rudin-Shapiro sequence) spread a row of equal numbers as well, which H alone would
// collect in one channel. H takes the largest power of two n ≤ D channels; if there are more, the
// same is done again to the last n.
#pragma once

#include "read_rows.h"

namespace sparge {
namespace {

struct RotationTables {
  alignas(64) float sign[kMaxDim] = {};
  alignas(
      64) float butterfly[4][kLanes] = {};  // -1 in the upper lane of each pair 1, 2, 4, 8 apart
  constexpr RotationTables() {
    for (int d = 0; d < kMaxDim; ++d) {
      int odd = 0;
      for (int bits = d & d >> 1; bits; bits >>= 1) odd ^= bits & 1;
      sign[d] = odd ? -1.0f : 1.0f;
    }
    for (int k = 0; k < 4; ++k)
      for (int lane = 0; lane < kLanes; ++lane) butterfly[k][lane] = lane >> k & 1 ? -1.0f : 1.0f;
  }
};
constexpr RotationTables kRotation;

// Sums in the lower and differences in the upper of lanes 2^k apart.
template <int k>
inline F32x16 butterfly(F32x16 x) {
  return fma(x, load(kRotation.butterfly[k]), swap_lanes<1 << k>(x));
}

// Signs and the orthonormal Hadamard transform of n numbers, in place; n is a power of two.
inline void rotate_part(float* x, int64_t n) {
  const float factor = float(1.0 / std::sqrt(double(n)));
  if (n < kLanes) {
    for (int64_t i = 0; i < n; ++i) x[i] *= kRotation.sign[i] * factor;
    for (int64_t half = 1; half < n; half *= 2)
      for (int64_t i = 0; i < n; ++i) {
        if (i & half) continue;
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 y = load(x + i) * (load(kRotation.sign + i) * broadcast(factor));
    store(x + i, butterfly<3>(butterfly<2>(butterfly<1>(butterfly<0>(y)))));
  }
  for (int64_t half = kLanes; half < n; half *= 2)
    for (int64_t i = 0; i < n; i += 2 * half)
      for (int64_t j = i; j < i + half; j += kLanes) {
        const F32x16 a = load(x + j), b = load(x + j + half);
        store(x + j, a + b);
        store(x + j + half, a - b);
      }
}

// Rotates the D numbers of a row, in place.
inline void rotate(float* row, int64_t D) {
  int64_t n = 1;
  while (2 * n <= D) n *= 2;
  rotate_part(row, n);
  if (n < D) rotate_part(row + (D - n), n);
}

}  // namespace
}  // namespace sparge
