// The matrix product behind all kernels: C[m][lane] += Σ_s A[m][s] ⊗ B[s][lane].
//
// A is a row-major matrix of 32-bit words, each broadcast to all lanes; B holds the words of 16
// lanes. A word is one fp32 number, two of 16 bits or four of 8 bits, and ⊗ their dot
// product. Scores are Sᵀ = K · Qᵀ, outputs Oᵀ = Vᵀ · Pᵀ: a query is always a lane.
#pragma once

#include "args.h"

#if defined(__clang__)
#define SPARGE_NOINLINE __attribute__((noinline))
#else
#define SPARGE_NOINLINE __attribute__((noinline, noclone))
#endif

namespace sparge {
namespace {

enum class Product { f32, bf16, i16, u8i8, tile_i8, tile_bf16, tile_u8 };

constexpr bool is_tile(Product p) {
  return p == Product::tile_i8 || p == Product::tile_bf16 || p == Product::tile_u8;
}
// Numbers in a word.
constexpr int per_word(Product p) {
  return p == Product::f32                                                    ? 1
         : p == Product::bf16 || p == Product::i16 || p == Product::tile_bf16 ? 2
                                                                              : 4;
}
constexpr bool is_integer(Product p) {
  return p == Product::i16 || p == Product::u8i8 || p == Product::tile_i8 || p == Product::tile_u8;
}
// Steps that D numbers take; the tile unit takes 16 at a time.
inline int steps_of(Product p, int64_t D) {
  const int steps = int((D + per_word(p) - 1) / per_word(p));
  return is_tile(p) ? (steps + 15) / 16 * 16 : steps;
}

// A of the vector products is stored in panels of kRowsAtOnce rows, [panel][step][row]: the words
// of a step are adjacent. The tile unit reads rows in place.
struct Words {
  const char* data;
  int64_t pitch;  // bytes between panels, or between rows for the tile unit
};
// Rows of `steps` words, `pitch` words from each other, become panels; rows from m on are zero.
inline void to_panels(const float* rows, int64_t pitch, int64_t m, int steps, float* out) {
  for (int64_t i = 0; i < m; i += kRowsAtOnce, out += int64_t(steps) * kRowsAtOnce) {
    int s = 0;
    if (i + kRowsAtOnce <= m)
      for (; s + kRowsAtOnce <= steps; s += kRowsAtOnce)
        transpose_panel(rows + i * pitch + s, pitch, out + s * kRowsAtOnce);
    for (; s < steps; ++s)
      for (int64_t r = 0; r < kRowsAtOnce; ++r) {
        if (i + r < m)
          std::memcpy(out + s * kRowsAtOnce + r, rows + (i + r) * pitch + s, 4);
        else
          out[s * kRowsAtOnce + r] = 0.0f;
      }
  }
}

template <Product P>
struct Acc {
  using T = F32x16;
  static F32x16 none() { return zero(); }
  static F32x16 get(const float* p) { return load(p); }
  static void put(float* p, F32x16 a) { store(p, a); }
};
template <>
struct Acc<Product::i16> {
  using T = I32x16;
  static I32x16 none() { return izero(); }
  static I32x16 get(const float* p) { return iload(reinterpret_cast<const int32_t*>(p)); }
  static void put(float* p, I32x16 a) { istore(reinterpret_cast<int32_t*>(p), a); }
};
template <>
struct Acc<Product::u8i8> : Acc<Product::i16> {};

template <Product P>
inline auto words_at(const float* b) {
  if constexpr (P == Product::f32)
    return load(b);
  else
    return iload(reinterpret_cast<const int32_t*>(b));
}
template <Product P, class B>
inline typename Acc<P>::T mad(typename Acc<P>::T acc, const char* a, B b) {
  if constexpr (P == Product::f32) return mad_f32(acc, a, b);
  if constexpr (P == Product::i16) return mad_i16(acc, a, b);
  if constexpr (P == Product::u8i8 && kHasBytes) return mad_u8i8(acc, a, b);
  if constexpr (P == Product::bf16 && kHasPairs) return mad_bf16(acc, a, b);
}

// One panel. Not inlined and not cloned, so that the loop has all registers; rows are unrolled, so
// that the compiler keeps the accumulators in them.
template <Product P, bool kAdd>
SPARGE_NOINLINE void product_panel(const char* a, const float* b, int steps, float* c) {
  using A = Acc<P>;
  typename A::T acc[kRowsAtOnce];
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) acc[m] = kAdd ? A::get(c + m * kLanes) : A::none();
#pragma GCC unroll 4
  for (int s = 0; s < steps; ++s) {
    const auto words = words_at<P>(b + s * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRowsAtOnce; ++m)
      acc[m] = mad<P>(acc[m], a + (s * kRowsAtOnce + m) * 4, words);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRowsAtOnce; ++m) A::put(c + m * kLanes, acc[m]);
}

// C is [m][16] words: fp32, or int32 of the integer products; m is rounded up to whole panels.
// With `add` the product is added to C.
template <Product P>
inline void product(Words a, int64_t m, const float* b, int steps, float* c, bool add) {
  for (int64_t i = 0; i < m; i += kRowsAtOnce, a.data += a.pitch)
    if (add)
      product_panel<P, true>(a.data, b, steps, c + i * kLanes);
    else
      product_panel<P, false>(a.data, b, steps, c + i * kLanes);
}
// The same for A as rows without gaps between them, which are read in place. The number of steps is
// a constant: then the rows are offsets of one address.
template <Product P, int kSteps>
SPARGE_NOINLINE void product_rows(const char* a, int64_t m, const float* b, float* c, bool add) {
  using A = Acc<P>;
  for (int64_t i = 0; i < m; i += kRowsAtOnce, a += int64_t(kRowsAtOnce) * kSteps * 4) {
    float* out = c + i * kLanes;
    typename A::T acc[kRowsAtOnce];
#pragma GCC unroll 16
    for (int r = 0; r < kRowsAtOnce; ++r) acc[r] = add ? A::get(out + r * kLanes) : A::none();
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
      const auto words = words_at<P>(b + s * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRowsAtOnce; ++r)
        acc[r] = mad<P>(acc[r], a + (r * kSteps + s) * 4, words);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRowsAtOnce; ++r) A::put(out + r * kLanes, acc[r]);
  }
}
// Whether there is such a product.
constexpr bool has_product_rows(int steps) {
  return steps == 16 || steps == 32 || steps == 64 || steps == 128;
}
template <Product P>
inline void product_in_place(const char* a, int64_t m, const float* b, int steps, float* c,
                             bool add) {
  if (steps == 16)
    product_rows<P, 16>(a, m, b, c, add);
  else if (steps == 32)
    product_rows<P, 32>(a, m, b, c, add);
  else if (steps == 64)
    product_rows<P, 64>(a, m, b, c, add);
  else
    product_rows<P, 128>(a, m, b, c, add);
}
// Panels without gaps.
inline Words panels_of(const void* data, int steps) {
  return {static_cast<const char*>(data), int64_t(steps) * kRowsAtOnce * 4};
}

}  // namespace
}  // namespace sparge
