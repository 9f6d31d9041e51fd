// Vector operations in portable C++: 16 lanes are arrays, which the compiler vectorizes. They also
// define what the operations of the other instruction sets mean.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../args.h"
#include "scalar.h"

namespace sparge {
namespace {

struct F32x16 {
  float v[16];
};
struct I32x16 {
  int32_t v[16];
};
using Lanes = uint32_t;  // one bit per lane

constexpr int kRowsAtOnce = 4;  // rows of A held in registers
constexpr bool kHasBytes = false, kHasPairs = false;

#define SPARGE_LANES for (int i = 0; i < 16; ++i)

inline F32x16 zero() { return F32x16{}; }
inline I32x16 izero() { return I32x16{}; }
inline F32x16 broadcast(float x) {
  F32x16 r;
  SPARGE_LANES r.v[i] = x;
  return r;
}
inline F32x16 load(const float* p) {
  F32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(float* p, F32x16 a) { std::memcpy(p, a.v, 64); }
inline I32x16 iload(const int32_t* p) {
  I32x16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void istore(int32_t* p, I32x16 a) { std::memcpy(p, a.v, 64); }
inline F32x16 operator+(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] += b.v[i];
  return a;
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] -= b.v[i];
  return a;
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] *= b.v[i];
  return a;
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] /= b.v[i];
  return a;
}
// a · b + c
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  SPARGE_LANES c.v[i] += a.v[i] * b.v[i];
  return c;
}
// Return the second operand where either is NaN.
inline F32x16 max(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 min(F32x16 a, F32x16 b) {
  SPARGE_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F32x16 abs(F32x16 a) {
  SPARGE_LANES a.v[i] = std::fabs(a.v[i]);
  return a;
}
inline F32x16 round(F32x16 a) {
  SPARGE_LANES a.v[i] = std::nearbyint(a.v[i]);
  return a;
}
inline F32x16 sqrt(F32x16 a) {
  SPARGE_LANES a.v[i] = std::sqrt(a.v[i]);
  return a;
}
inline Lanes less(F32x16 a, F32x16 b) {
  Lanes m = 0;
  SPARGE_LANES m |= Lanes(a.v[i] < b.v[i]) << i;
  return m;
}
inline Lanes at_least(F32x16 a, F32x16 b) {
  Lanes m = 0;
  SPARGE_LANES m |= Lanes(a.v[i] >= b.v[i]) << i;
  return m;
}
inline F32x16 select(Lanes m, F32x16 yes, F32x16 no) {
  SPARGE_LANES no.v[i] = m >> i & 1 ? yes.v[i] : no.v[i];
  return no;
}
inline float lane_max(F32x16 a) {
  float m = a.v[0];
  SPARGE_LANES m = a.v[i] > m ? a.v[i] : m;
  return m;
}
// Adds halves: lane i to lane i + 8, then i + 4, and so on.
inline float lane_sum(F32x16 a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
  return a.v[0];
}
// Lane i receives lane i ^ k.
template <int k>
inline F32x16 swap_lanes(F32x16 a) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = a.v[i ^ k];
  return out;
}
inline F32x16 to_float(I32x16 a) {
  F32x16 r;
  SPARGE_LANES r.v[i] = float(a.v[i]);
  return r;
}

// split: x = whole + f. raise: p · 2^whole where x is at least -126, else 0.
constexpr bool kSplitFloors = false;
inline F32x16 split(F32x16 x, F32x16* whole) {
  F32x16 f;
  SPARGE_LANES {
    const float y = x.v[i] < -126.0f ? -126.0f : x.v[i];
    whole->v[i] = std::nearbyint(y);
    f.v[i] = y - whole->v[i];
  }
  return f;
}
template <bool kExactZero>
inline F32x16 raise(F32x16 p, F32x16 whole, F32x16 x) {
  SPARGE_LANES {
    const float n = whole.v[i] == whole.v[i] ? whole.v[i] : 0.0f;
    const uint32_t bits = uint32_t(int32_t(n < 127.0f ? n : 127.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    p.v[i] = x.v[i] < -126.0f ? 0.0f : p.v[i] * power;
  }
  return p;
}

inline F32x16 load_bf16(const void* p) {
  F32x16 r;
  SPARGE_LANES r.v[i] = from_bf16(static_cast<const uint16_t*>(p)[i]);
  return r;
}
inline F32x16 load_f16(const void* p) {
  F32x16 r;
  SPARGE_LANES r.v[i] = from_f16(static_cast<const uint16_t*>(p)[i]);
  return r;
}
inline F32x16 load_i8(const int8_t* p) {
  F32x16 r;
  SPARGE_LANES r.v[i] = p[i];
  return r;
}
// Integers in -128 … 127.
inline void store_i8(int8_t* p, F32x16 a) { SPARGE_LANES p[i] = int8_t(a.v[i]); }
inline void store_bf16(void* p, F32x16 a) {
  SPARGE_LANES static_cast<uint16_t*>(p)[i] = to_bf16(a.v[i]);
}
inline void store_f16(void* p, F32x16 a) {
  SPARGE_LANES static_cast<uint16_t*>(p)[i] = to_f16(a.v[i]);
}

// 16 codes as 16-bit numbers.
inline void widen_i8(const int8_t* p, void* out) {
  int16_t w[16];
  SPARGE_LANES w[i] = p[i];
  std::memcpy(out, w, 32);
}

// Two 16-bit halves of a word, [low, high]: bf16, or integers from floats or from bytes.
inline I32x16 pair_bf16(F32x16 low, F32x16 high) {
  I32x16 r;
  SPARGE_LANES r.v[i] = int32_t(to_bf16(low.v[i]) | uint32_t(to_bf16(high.v[i])) << 16);
  return r;
}
// Rounded to an integer; 0 for NaN, which the row sum carries already.
inline uint32_t nearest(float x) { return x == x ? uint32_t(int32_t(std::nearbyint(x))) : 0; }
inline I32x16 pair_i16(F32x16 low, F32x16 high) {
  I32x16 r;
  SPARGE_LANES r.v[i] = int32_t((nearest(low.v[i]) & 0xffff) | nearest(high.v[i]) << 16);
  return r;
}
inline I32x16 pair_codes(const int8_t* low, const int8_t* high) {
  I32x16 r;
  SPARGE_LANES r.v[i] = int32_t(uint32_t(uint16_t(low[i])) | uint32_t(uint16_t(high[i])) << 16);
  return r;
}
// Four bytes of a word, integers in 0 … 255.
inline I32x16 quad_u8(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
  I32x16 r;
  SPARGE_LANES r.v[i] = int32_t(nearest(a.v[i]) | nearest(b.v[i]) << 8 | nearest(c.v[i]) << 16 |
                                nearest(d.v[i]) << 24);
  return r;
}
// Transposes 16 x 16 words; strides in words.
inline void transpose(const float* in, int64_t in_row, float* out, int64_t out_row) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) std::memcpy(out + c * out_row + r, in + r * in_row + c, 4);
}

// Transposes kRowsAtOnce rows of as many steps into a packed panel.
inline void transpose_panel(const float* in, int64_t in_row, float* out) {
  for (int r = 0; r < kRowsAtOnce; ++r)
    for (int c = 0; c < kRowsAtOnce; ++c)
      std::memcpy(out + c * kRowsAtOnce + r, in + r * in_row + c, 4);
}
// Stores 16 words to the panels they belong to, `pitch` words from each other.
inline void store_panels(float* out, int64_t pitch, I32x16 a) {
  for (int p = 0; p < 16 / kRowsAtOnce; ++p)
    std::memcpy(out + p * pitch, a.v + p * kRowsAtOnce, kRowsAtOnce * 4);
}
inline I32x16 as_words(F32x16 a) {
  I32x16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}

// acc + word(a) ⊗ b; a word is one number, or two of 16 bits.
inline F32x16 mad_f32(F32x16 acc, const char* a, F32x16 b) {
  float x;
  std::memcpy(&x, a, 4);
  return fma(broadcast(x), b, acc);
}
inline I32x16 mad_i16(I32x16 acc, const char* a, I32x16 b) {
  int16_t x[2];
  std::memcpy(x, a, 4);
  SPARGE_LANES acc.v[i] += x[0] * int16_t(b.v[i]) + x[1] * (b.v[i] >> 16);
  return acc;
}

// Sum of 64 codes.
inline int32_t sum_i8(const int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 64; ++i) sum += p[i];
  return sum;
}

#undef SPARGE_LANES

}  // namespace
}  // namespace sparge

#include "exp2.h"
