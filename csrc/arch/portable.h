// The words every machine knows: 16 lanes as plain arrays, which the compiler vectorizes as it
// can. Also the meaning of the words that the other instruction sets say in one instruction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../args.h"
#include "scalar.h"

namespace sparge {
namespace {

struct F16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};
using Lanes = uint32_t;  // one bit per lane

constexpr const char* kName = "portable";
constexpr int kRowsAtOnce = 4;  // rows of A in registers
constexpr bool kHasBytes = false, kHasPairs = false;

#define SPARGE_LANES for (int i = 0; i < 16; ++i)

inline F16 zero() { return F16{}; }
inline I16 izero() { return I16{}; }
inline F16 all(float x) {
  F16 r;
  SPARGE_LANES r.v[i] = x;
  return r;
}
inline F16 load(const float* p) {
  F16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store(float* p, F16 a) { std::memcpy(p, a.v, 64); }
inline I16 iload(const int32_t* p) {
  I16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void istore(int32_t* p, I16 a) { std::memcpy(p, a.v, 64); }
inline F16 operator+(F16 a, F16 b) {
  SPARGE_LANES a.v[i] += b.v[i];
  return a;
}
inline F16 operator-(F16 a, F16 b) {
  SPARGE_LANES a.v[i] -= b.v[i];
  return a;
}
inline F16 operator*(F16 a, F16 b) {
  SPARGE_LANES a.v[i] *= b.v[i];
  return a;
}
inline F16 operator/(F16 a, F16 b) {
  SPARGE_LANES a.v[i] /= b.v[i];
  return a;
}
// a · b + c
inline F16 fma(F16 a, F16 b, F16 c) {
  SPARGE_LANES c.v[i] += a.v[i] * b.v[i];
  return c;
}
// The second operand where one is NaN.
inline F16 max(F16 a, F16 b) {
  SPARGE_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F16 min(F16 a, F16 b) {
  SPARGE_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F16 abs(F16 a) {
  SPARGE_LANES a.v[i] = std::fabs(a.v[i]);
  return a;
}
inline F16 round(F16 a) {
  SPARGE_LANES a.v[i] = std::nearbyint(a.v[i]);
  return a;
}
inline F16 sqrt(F16 a) {
  SPARGE_LANES a.v[i] = std::sqrt(a.v[i]);
  return a;
}
inline Lanes less(F16 a, F16 b) {
  Lanes m = 0;
  SPARGE_LANES m |= Lanes(a.v[i] < b.v[i]) << i;
  return m;
}
inline Lanes at_least(F16 a, F16 b) {
  Lanes m = 0;
  SPARGE_LANES m |= Lanes(a.v[i] >= b.v[i]) << i;
  return m;
}
inline F16 select(Lanes m, F16 yes, F16 no) {
  SPARGE_LANES no.v[i] = m >> i & 1 ? yes.v[i] : no.v[i];
  return no;
}
inline float lane_max(F16 a) {
  float m = a.v[0];
  SPARGE_LANES m = a.v[i] > m ? a.v[i] : m;
  return m;
}
// By halves.
inline float lane_sum(F16 a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; ++i) a.v[i] += a.v[i + n];
  return a.v[0];
}
inline F16 to_float(I16 a) {
  F16 r;
  SPARGE_LANES r.v[i] = float(a.v[i]);
  return r;
}

// x = whole + f, and p · 2^whole where x is at least -126, else 0.
constexpr bool kSplitFloors = false;
inline F16 split(F16 x, F16* whole) {
  F16 f;
  SPARGE_LANES {
    const float y = x.v[i] < -126.0f ? -126.0f : x.v[i];
    whole->v[i] = std::nearbyint(y);
    f.v[i] = y - whole->v[i];
  }
  return f;
}
template <bool kExactZero>
inline F16 raise(F16 p, F16 whole, F16 x) {
  SPARGE_LANES {
    const float n = whole.v[i] == whole.v[i] ? whole.v[i] : 0.0f;
    const uint32_t bits = uint32_t(int32_t(n < 127.0f ? n : 127.0f) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    p.v[i] = x.v[i] < -126.0f ? 0.0f : p.v[i] * power;
  }
  return p;
}

inline F16 load_bf16(const void* p) {
  F16 r;
  SPARGE_LANES r.v[i] = from_bf16(static_cast<const uint16_t*>(p)[i]);
  return r;
}
inline F16 load_f16(const void* p) {
  F16 r;
  SPARGE_LANES r.v[i] = from_f16(static_cast<const uint16_t*>(p)[i]);
  return r;
}
inline F16 load_i8(const int8_t* p) {
  F16 r;
  SPARGE_LANES r.v[i] = p[i];
  return r;
}
// Whole numbers in -128 … 127.
inline void store_i8(int8_t* p, F16 a) { SPARGE_LANES p[i] = int8_t(a.v[i]); }
inline void store_bf16(void* p, F16 a) {
  SPARGE_LANES static_cast<uint16_t*>(p)[i] = to_bf16(a.v[i]);
}
inline void store_f16(void* p, F16 a) {
  SPARGE_LANES static_cast<uint16_t*>(p)[i] = to_f16(a.v[i]);
}

// 16 codes as 16-bit numbers.
inline void widen_i8(const int8_t* p, void* out) {
  int16_t w[16];
  SPARGE_LANES w[i] = p[i];
  std::memcpy(out, w, 32);
}

// Two 16-bit halves of a word: [low, high] as bf16, and as whole numbers, of floats or of bytes.
inline I16 pair_bf16(F16 low, F16 high) {
  I16 r;
  SPARGE_LANES r.v[i] = int32_t(to_bf16(low.v[i]) | uint32_t(to_bf16(high.v[i])) << 16);
  return r;
}
// Rounded; NaN, which some other sum already carries, is 0 as an integer.
inline uint32_t nearest(float x) { return x == x ? uint32_t(int32_t(std::nearbyint(x))) : 0; }
inline I16 pair_i16(F16 low, F16 high) {
  I16 r;
  SPARGE_LANES r.v[i] = int32_t((nearest(low.v[i]) & 0xffff) | nearest(high.v[i]) << 16);
  return r;
}
inline I16 pair_codes(const int8_t* low, const int8_t* high) {
  I16 r;
  SPARGE_LANES r.v[i] = int32_t(uint32_t(uint16_t(low[i])) | uint32_t(uint16_t(high[i])) << 16);
  return r;
}
// Four bytes of a word, whole numbers in 0 … 255.
inline I16 quad_u8(F16 a, F16 b, F16 c, F16 d) {
  I16 r;
  SPARGE_LANES r.v[i] = int32_t(nearest(a.v[i]) | nearest(b.v[i]) << 8 | nearest(c.v[i]) << 16 |
                                nearest(d.v[i]) << 24);
  return r;
}
// 16 x 16 words turned over; strides in words.
inline void transpose(const float* in, int64_t in_row, float* out, int64_t out_row) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 16; ++c) std::memcpy(out + c * out_row + r, in + r * in_row + c, 4);
}

// kRowsAtOnce rows and as many steps turned over, packed.
inline void transpose_panel(const float* in, int64_t in_row, float* out) {
  for (int r = 0; r < kRowsAtOnce; ++r)
    for (int c = 0; c < kRowsAtOnce; ++c)
      std::memcpy(out + c * kRowsAtOnce + r, in + r * in_row + c, 4);
}
// 16 words to the panels they belong to, `apart` words from each other.
inline void store_panels(float* out, int64_t apart, I16 a) {
  for (int p = 0; p < 16 / kRowsAtOnce; ++p)
    std::memcpy(out + p * apart, a.v + p * kRowsAtOnce, kRowsAtOnce * 4);
}
inline I16 as_words(F16 a) {
  I16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}

// acc + word(a) ⊗ b, the word being one number, two of 16 bits, or four of 8 bits.
inline F16 mad_f32(F16 acc, const char* a, F16 b) {
  float x;
  std::memcpy(&x, a, 4);
  return fma(all(x), b, acc);
}
inline I16 mad_i16(I16 acc, const char* a, I16 b) {
  int16_t x[2];
  std::memcpy(x, a, 4);
  SPARGE_LANES acc.v[i] += x[0] * int16_t(b.v[i]) + x[1] * (b.v[i] >> 16);
  return acc;
}

#undef SPARGE_LANES

}  // namespace
}  // namespace sparge

#include "exp2.h"
