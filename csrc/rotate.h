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

// What a transform of n channels multiplies with: signs / sqrt(n). The factor comes first, so that
// sums grow by sqrt(n) and not by n.
template <int n>
struct Signs {
  alignas(64) float of[n] = {};
  constexpr Signs() {
    double factor = 1.0;
    int rest = n;
    for (; rest >= 4; rest /= 4) factor /= 2;
    if (rest == 2) factor *= 0.70710678118654752440;
    for (int d = 0; d < n; ++d) {
      int odd = 0;
      for (int bits = d & d >> 1; bits; bits >>= 1) odd ^= bits & 1;
      of[d] = float(odd ? -factor : factor);
    }
  }
};
template <int n>
constexpr Signs<n> kSigns{};

// 1 and -1 for the lower and the upper lane of each pair 2^k apart.
struct Butterflies {
  alignas(64) float sign[4][kLanes] = {};
  constexpr Butterflies() {
    for (int k = 0; k < 4; ++k)
      for (int lane = 0; lane < kLanes; ++lane) sign[k][lane] = lane >> k & 1 ? -1.0f : 1.0f;
  }
};
constexpr Butterflies kButterflies{};

// Sums in the lower and differences in the upper of lanes 2^k apart.
template <int k>
inline F32x16 butterfly(F32x16 x) {
  return fma(x, load(kButterflies.sign[k]), swap_lanes<1 << k>(x));
}

// Signs and the orthonormal Hadamard transform of n numbers, in place.
template <int n>
inline void rotate_part(float* x) {
  if constexpr (n < kLanes) {
    for (int i = 0; i < n; ++i) x[i] *= kSigns<n>.of[i];
    for (int half = 1; half < n; half *= 2)
      for (int i = 0; i < n; ++i) {
        if (i & half) continue;
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  } else {
    constexpr int parts = n / kLanes;
    F32x16 r[parts];
#pragma GCC unroll 16
    for (int i = 0; i < parts; ++i) {
      const F32x16 y = load(x + i * kLanes) * load(kSigns<n>.of + i * kLanes);
      r[i] = butterfly<3>(butterfly<2>(butterfly<1>(butterfly<0>(y))));
    }
#pragma GCC unroll 4
    for (int half = 1; half < parts; half *= 2)
#pragma GCC unroll 16
      for (int i = 0; i < parts; ++i) {
        if (i & half) continue;
        const F32x16 a = r[i], b = r[i + half];
        r[i] = a + b;
        r[i + half] = a - b;
      }
#pragma GCC unroll 16
    for (int i = 0; i < parts; ++i) store(x + i * kLanes, r[i]);
  }
}

template <int n>
inline void rotate_row(float* row, int64_t D) {
  rotate_part<n>(row);
  if (n < D) rotate_part<n>(row + (D - n));
}

// Rotates the D numbers of a row, in place.
inline void rotate(float* row, int64_t D) {
  if (D >= 256) return rotate_row<256>(row, D);
  if (D >= 128) return rotate_row<128>(row, D);
  if (D >= 64) return rotate_row<64>(row, D);
  if (D >= 32) return rotate_row<32>(row, D);
  if (D >= 16) return rotate_row<16>(row, D);
  if (D >= 8) return rotate_row<8>(row, D);
  if (D >= 4) return rotate_row<4>(row, D);
  if (D >= 2) rotate_row<2>(row, D);
}

}  // namespace
}  // namespace sparge
