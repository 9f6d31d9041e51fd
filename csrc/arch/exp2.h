// 2^x from `split` and `raise` of an instruction set.
#pragma once

namespace sparge {
namespace {

// Minimax coefficients of 2^f, relative error 2.6e-6 (degree 4) and 2e-9 (degree 6), for f in
// [-1/2, 1/2] if `split` rounds, and in [0, 1] if it floors.
template <int kDegree, bool kFloored>
struct Exp2Terms;
template <>
struct Exp2Terms<4, false> {
  static constexpr float c[] = {0.9999992614f, 0.6931218147f, 0.2402474483f, 0.05591786032f,
                                0.009570101911f};
};
template <>
struct Exp2Terms<6, false> {
  static constexpr float c[] = {1.0f,           0.6931472057f,   0.2402264689f,
                                0.05550328777f, 0.009618488957f, 0.001339993122f,
                                0.00015345812f};
};
template <>
struct Exp2Terms<4, true> {
  static constexpr float c[] = {1.000002593f, 0.6930038345f, 0.2414427569f, 0.05201146061f,
                                0.01353416792f};
};
template <>
struct Exp2Terms<6, true> {
  static constexpr float c[] = {1.0f,
                                0.6931469838f,
                                0.2402298363f,
                                0.05548334198f,
                                0.009678840996f,
                                0.001243968783f,
                                0.0002170225545f};
};

// 2^x for x up to 127, NaN for NaN. Below 2^-126 exactly 0; without kExactZero, which is faster, at
// most 2^-125. `kTimes` is a factor folded into the coefficients.
template <int kDegree, bool kExactZero = true, int kTimes = 1>
inline F32x16 exp2(F32x16 x) {
  using Terms = Exp2Terms<kDegree, kSplitFloors>;
  F32x16 whole;
  const F32x16 f = split(x, &whole);
  F32x16 p = broadcast(Terms::c[kDegree] * kTimes);
  for (int k = kDegree - 1; k >= 0; --k) p = fma(p, f, broadcast(Terms::c[k] * kTimes));
  return raise<kExactZero>(p, whole, x);
}

}  // namespace
}  // namespace sparge
