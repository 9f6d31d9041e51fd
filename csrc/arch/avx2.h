// Vector operations of AVX2 with FMA and F16C: 16 lanes are two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../args.h"
#include "scalar.h"

namespace sparge {
namespace {

struct F32x16 {
  __m256 lo, hi;
};
struct I32x16 {
  __m256i lo, hi;
};
using Lanes = uint32_t;  // one bit per lane

constexpr int kRowsAtOnce =
    4;  // rows of A held in registers: 8 accumulators hide the latency of an FMA
constexpr bool kHasBytes = false, kHasPairs = false;

inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline I32x16 izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline I32x16 iload(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline void istore(int32_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline F32x16 operator+(F32x16 a, F32x16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a · b + c
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// Return the second operand where either is NaN.
inline F32x16 max(F32x16 a, F32x16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline F32x16 abs(F32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline F32x16 round(F32x16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
inline F32x16 sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Lanes less(F32x16 a, F32x16 b) {
  return Lanes(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ))) |
         Lanes(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))) << 8;
}
inline Lanes at_least(F32x16 a, F32x16 b) {
  return Lanes(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
         Lanes(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
inline __m256 lane_mask(Lanes m) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(
      _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(m)), bits), bits));
}
inline F32x16 select(Lanes m, F32x16 yes, F32x16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, lane_mask(m)),
          _mm256_blendv_ps(no.hi, yes.hi, lane_mask(m >> 8))};
}
inline float lane_max(F32x16 a) {
  const __m256 m = _mm256_max_ps(a.lo, a.hi);
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
// Adds halves: lane i to lane i + 8, then i + 4, and so on.
inline float lane_sum(F32x16 a) {
  const __m256 m = _mm256_add_ps(a.lo, a.hi);
  __m128 n = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_add_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_add_ss(n, _mm_movehdup_ps(n)));
}
// Lane i receives lane i ^ k.
template <int k>
inline F32x16 swap_lanes(F32x16 a) {
  constexpr int order = k == 2 ? 0x4e : 0xb1;
  if constexpr (k == 8)
    return {a.hi, a.lo};
  else if constexpr (k == 4)
    return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
  else
    return {_mm256_permute_ps(a.lo, order), _mm256_permute_ps(a.hi, order)};
}
inline F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// split: x = whole + f. raise: p · 2^whole where x is at least -126, else 0. `whole` is kept in the
// low bits of a float near 1.5 · 2^23, from where a shift moves it to the exponent.
constexpr bool kSplitFloors = false;
inline F32x16 split(F32x16 x, F32x16* whole) {
  const F32x16 magic = broadcast(12582912.0f);
  const F32x16 y = max(broadcast(-126.0f), x);
  *whole = y + magic;
  return y - (*whole - magic);
}
template <bool kExactZero>
inline __m256 raise(__m256 p, __m256 whole, __m256 x) {
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(whole), 23);
  const __m256 raised = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
  if (!kExactZero) return raised;
  return _mm256_and_ps(raised, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}
template <bool kExactZero>
inline F32x16 raise(F32x16 p, F32x16 whole, F32x16 x) {
  return {raise<kExactZero>(p.lo, whole.lo, x.lo), raise<kExactZero>(p.hi, whole.hi, x.hi)};
}

inline __m256 widen_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F32x16 load_bf16(const void* p) {
  return {widen_bf16(static_cast<const uint16_t*>(p)),
          widen_bf16(static_cast<const uint16_t*>(p) + 8)};
}
inline F32x16 load_f16(const void* p) {
  const __m128i* h = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline F32x16 load_i8(const int8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
// Integers in -128 … 127.
inline void store_i8(int8_t* p, F32x16 a) {
  const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(w, 0xd8);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
// bf16 in the upper half of each lane, rounded to nearest even; NaN stays NaN.
inline __m256i round_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan);
}
inline void store_bf16(void* p, F32x16 a) {
  const __m256i w = _mm256_packus_epi32(_mm256_srli_epi32(round_bf16(a.lo), 16),
                                        _mm256_srli_epi32(round_bf16(a.hi), 16));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(w, 0xd8));
}
inline void store_f16(void* p, F32x16 a) {
  __m128i* h = static_cast<__m128i*>(p);
  _mm_storeu_si128(h, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(h + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}

// 16 codes as 16-bit numbers.
inline void widen_i8(const int8_t* p, void* out) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  _mm256_storeu_si256(static_cast<__m256i*>(out), _mm256_cvtepi8_epi16(b));
}

// Two 16-bit halves of a word, [low, high]: bf16, or integers from floats or from bytes.
inline I32x16 pair_bf16(F32x16 low, F32x16 high) {
  return {_mm256_blend_epi16(_mm256_srli_epi32(round_bf16(low.lo), 16), round_bf16(high.lo), 0xaa),
          _mm256_blend_epi16(_mm256_srli_epi32(round_bf16(low.hi), 16), round_bf16(high.hi), 0xaa)};
}
inline I32x16 pair_i16(F32x16 low, F32x16 high) {
  return {_mm256_blend_epi16(_mm256_cvtps_epi32(low.lo),
                             _mm256_slli_epi32(_mm256_cvtps_epi32(high.lo), 16), 0xaa),
          _mm256_blend_epi16(_mm256_cvtps_epi32(low.hi),
                             _mm256_slli_epi32(_mm256_cvtps_epi32(high.hi), 16), 0xaa)};
}
inline I32x16 pair_codes(const int8_t* low, const int8_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)),
          _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}
// Four bytes of a word, integers in 0 … 255.
inline __m256i quad_u8(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256i low =
      _mm256_or_si256(_mm256_cvtps_epi32(a), _mm256_slli_epi32(_mm256_cvtps_epi32(b), 8));
  const __m256i high = _mm256_or_si256(_mm256_slli_epi32(_mm256_cvtps_epi32(c), 16),
                                       _mm256_slli_epi32(_mm256_cvtps_epi32(d), 24));
  return _mm256_or_si256(low, high);
}
inline I32x16 quad_u8(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
  return {quad_u8(a.lo, b.lo, c.lo, d.lo), quad_u8(a.hi, b.hi, c.hi, d.hi)};
}

// Transposes 16 x 16 words; strides in words.
inline void transpose(const float* in, int64_t in_row, float* out, int64_t out_row) {
  for (int r = 0; r < 16; r += 4)
    for (int c = 0; c < 16; c += 4) {
      const float* p = in + r * in_row + c;
      __m128 a = _mm_loadu_ps(p), b = _mm_loadu_ps(p + in_row);
      __m128 d = _mm_loadu_ps(p + 2 * in_row), e = _mm_loadu_ps(p + 3 * in_row);
      _MM_TRANSPOSE4_PS(a, b, d, e);
      float* q = out + c * out_row + r;
      _mm_storeu_ps(q, a);
      _mm_storeu_ps(q + out_row, b);
      _mm_storeu_ps(q + 2 * out_row, d);
      _mm_storeu_ps(q + 3 * out_row, e);
    }
}

// Transposes 4 rows of 4 steps into a packed panel.
inline void transpose_panel(const float* in, int64_t in_row, float* out) {
  __m128 a = _mm_loadu_ps(in), b = _mm_loadu_ps(in + in_row);
  __m128 c = _mm_loadu_ps(in + 2 * in_row), d = _mm_loadu_ps(in + 3 * in_row);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(out, a);
  _mm_storeu_ps(out + 4, b);
  _mm_storeu_ps(out + 8, c);
  _mm_storeu_ps(out + 12, d);
}
// Stores 16 words to the panels they belong to, `pitch` words from each other.
inline void store_panels(float* out, int64_t pitch, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + pitch), _mm256_extracti128_si256(a.lo, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * pitch), _mm256_castsi256_si128(a.hi));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * pitch), _mm256_extracti128_si256(a.hi, 1));
}
inline I32x16 as_words(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }

// acc + word(a) ⊗ b; a word is one number, or two of 16 bits.
inline F32x16 mad_f32(F32x16 acc, const char* a, F32x16 b) {
  const __m256 x = _mm256_broadcast_ss(reinterpret_cast<const float*>(a));
  return {_mm256_fmadd_ps(x, b.lo, acc.lo), _mm256_fmadd_ps(x, b.hi, acc.hi)};
}
inline I32x16 mad_i16(I32x16 acc, const char* a, I32x16 b) {
  const __m256i x = _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(a)));
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(x, b.lo)),
          _mm256_add_epi32(acc.hi, _mm256_madd_epi16(x, b.hi))};
}

// Sum of 64 codes.
inline int32_t sum_i8(const int8_t* p) {
  int32_t sum = 0;
  for (int i = 0; i < 64; ++i) sum += p[i];
  return sum;
}

}  // namespace
}  // namespace sparge

#include "exp2.h"
