// Vector operations of AVX-512 (F, BW, DQ, VL, VNNI; BF16 if compiled for it): 16 lanes are one
// register.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../args.h"
#include "scalar.h"

namespace sparge {
namespace {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};
using Lanes = uint32_t;  // one bit per lane

#ifdef __AVX512BF16__
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif
constexpr int kRowsAtOnce = 16;  // rows of A held in registers
constexpr bool kHasBytes = true;

inline F32x16 zero() { return {_mm512_setzero_ps()}; }
inline I32x16 izero() { return {_mm512_setzero_si512()}; }
inline F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline I32x16 iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a · b + c
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Return the second operand where either is NaN.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
inline F32x16 round(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F32x16 sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline Lanes less(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline Lanes at_least(F32x16 a, F32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline F32x16 select(Lanes m, F32x16 yes, F32x16 no) {
  return {_mm512_mask_blend_ps(__mmask16(m), no.v, yes.v)};
}
inline float lane_max(F32x16 a) { return _mm512_reduce_max_ps(a.v); }
// Adds halves: lane i to lane i + 8, then i + 4, and so on.
inline float lane_sum(F32x16 a) { return _mm512_reduce_add_ps(a.v); }
// Lane i receives lane i ^ k.
template <int k>
inline F32x16 swap_lanes(F32x16 a) {
  if constexpr (k >= 4)
    return {_mm512_shuffle_f32x4(a.v, a.v, k == 8 ? 0x4e : 0xb1)};
  else
    return {_mm512_permute_ps(a.v, k == 2 ? 0x4e : 0xb1)};
}
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

// split: x = whole + f. raise: p · 2^whole where x is at least -126, else 0. The scaling
// instruction floors its exponent, so `whole` is floored, and x itself can be passed for it.
constexpr bool kSplitFloors = true;
inline F32x16 split(F32x16 x, F32x16* whole) {
  *whole = x;
  return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
template <bool kExactZero>
inline F32x16 raise(F32x16 p, F32x16 whole, F32x16 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(normal, p.v, whole.v)};
}

inline F32x16 load_bf16(const void* p) {
  const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline F32x16 load_f16(const void* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
inline F32x16 load_i8(const int8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))};
}
// Integers in -128 … 127.
inline void store_i8(int8_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// bf16 in the upper half of each lane, rounded to nearest even; NaN stays NaN.
inline __m512i round_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                               _mm512_set1_epi32(0x7fc00000));
}
inline void store_bf16(void* p, F32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16(a.v), 16)));
}
inline void store_f16(void* p, F32x16 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

// 16 codes as 16-bit numbers.
inline void widen_i8(const int8_t* p, void* out) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  _mm256_storeu_si256(static_cast<__m256i*>(out), _mm256_cvtepi8_epi16(b));
}

// Two 16-bit halves of a word, [low, high]: bf16, or integers from floats or from bytes.
inline I32x16 pair_bf16(F32x16 low, F32x16 high) {
#ifdef __AVX512BF16__
  // The instruction returns 16 lows and then 16 highs; one permutation pairs them.
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(order, both)};
#else
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(round_bf16(low.v), 16),
                                  round_bf16(high.v))};
#endif
}
inline I32x16 pair_i16(F32x16 low, F32x16 high) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(low.v),
                                  _mm512_slli_epi32(_mm512_cvtps_epi32(high.v), 16))};
}
inline I32x16 pair_codes(const int8_t* low, const int8_t* high) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
  return {_mm512_cvtepi8_epi16(both)};
}
// Four bytes of a word, integers in 0 … 255.
inline I32x16 quad_u8(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
  const __m512i low =
      _mm512_or_si512(_mm512_cvtps_epi32(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(b.v), 8));
  const __m512i high = _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtps_epi32(c.v), 16),
                                       _mm512_slli_epi32(_mm512_cvtps_epi32(d.v), 24));
  return {_mm512_or_si512(low, high)};
}

// Transposes 16 x 16 words; strides in words. A register takes four columns of every fourth row;
// transposing 4 x 4 within its quarters leaves the 16 rows of one column in each register.
inline void transpose(const float* in, int64_t in_row, float* out, int64_t out_row) {
  for (int c = 0; c < 16; c += 4) {
    __m512 rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const float* p = in + r * in_row + c;
      __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(p));
      x = _mm512_insertf32x4(x, _mm_loadu_ps(p + 4 * in_row), 1);
      x = _mm512_insertf32x4(x, _mm_loadu_ps(p + 8 * in_row), 2);
      rows[r] = _mm512_insertf32x4(x, _mm_loadu_ps(p + 12 * in_row), 3);
    }
    const __m512 low01 = _mm512_unpacklo_ps(rows[0], rows[1]);
    const __m512 low23 = _mm512_unpacklo_ps(rows[2], rows[3]);
    const __m512 high01 = _mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512 high23 = _mm512_unpackhi_ps(rows[2], rows[3]);
    float* q = out + c * out_row;
    _mm512_storeu_ps(q, _mm512_shuffle_ps(low01, low23, 0x44));
    _mm512_storeu_ps(q + out_row, _mm512_shuffle_ps(low01, low23, 0xee));
    _mm512_storeu_ps(q + 2 * out_row, _mm512_shuffle_ps(high01, high23, 0x44));
    _mm512_storeu_ps(q + 3 * out_row, _mm512_shuffle_ps(high01, high23, 0xee));
  }
}
// Transposes 16 rows of 16 steps into a packed panel.
inline void transpose_panel(const float* in, int64_t in_row, float* out) {
  transpose(in, in_row, out, 16);
}
// Stores 16 words to the panel they belong to.
inline void store_panels(float* out, int64_t, I32x16 a) { _mm512_storeu_si512(out, a.v); }
inline I32x16 as_words(F32x16 a) { return {_mm512_castps_si512(a.v)}; }

// acc + word(a) ⊗ b; a word is one number, two of 16 bits, or four of 8 bits.
inline F32x16 mad_f32(F32x16 acc, const char* a, F32x16 b) {
  return {_mm512_fmadd_ps(_mm512_set1_ps(*reinterpret_cast<const float*>(a)), b.v, acc.v)};
}
inline __m512i word(const char* a) {
  int32_t w;
  std::memcpy(&w, a, 4);
  return _mm512_set1_epi32(w);
}
inline I32x16 mad_i16(I32x16 acc, const char* a, I32x16 b) {
  return {_mm512_dpwssd_epi32(acc.v, b.v, word(a))};
}
// Bytes of b are unsigned, bytes of a signed.
inline I32x16 mad_u8i8(I32x16 acc, const char* a, I32x16 b) {
  return {_mm512_dpbusd_epi32(acc.v, b.v, word(a))};
}
// Sum of 64 codes.
inline int32_t sum_i8(const int8_t* p) {
  return _mm512_reduce_add_epi32(
      _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(p)));
}
#ifdef __AVX512BF16__
inline F32x16 mad_bf16(F32x16 acc, const char* a, I32x16 b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)b.v, (__m512bh)word(a))};
}
#endif

}  // namespace
}  // namespace sparge

#include "exp2.h"
