// Words that SSE says for every x86 instruction set.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace sparge {
namespace {

// 16 x 16 words turned over; strides in words.
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

}  // namespace
}  // namespace sparge
