// The kind of every block of a row: no pair may attend, some may, or all may without a bias.
#pragma once

#include <algorithm>

#include "arch/scalar.h"
#include "args.h"

namespace sparge {

inline void kinds_of_row(const TokenMask& t, int64_t b, int64_t h, int64_t i_q, int64_t Lq,
                         int64_t Lk, int8_t* out) {
  const char* head = t.data + b * t.stride_b + h * t.stride_h;
  const int64_t first = i_q * kBlockQ, last = std::min(first + kBlockQ, Lq);
  for (int64_t i_k = 0; i_k * kBlockK < Lk; ++i_k) {
    const int64_t start = i_k * kBlockK, stop = std::min(start + kBlockK, Lk);
    bool some = false, every = true;
    // Stop at the first sign that it is mixed.
    for (int64_t q = first; q < last && !(some && !every); ++q) {
      const int64_t end = t.is_causal ? std::min(stop, q + t.offset + 1) : stop;
      every &= end == stop;
      const char* row = head + q * t.stride_q;
      for (int64_t k = start; k < end; ++k) {
        const char* p = row + k * t.stride_k;
        bool may, plain;
        if (t.type == MaskType::boolean) {
          may = plain = *p != 0;
        } else {
          float x;
          uint16_t half;
          if (t.type == MaskType::f32)
            std::memcpy(&x, p, 4);
          else {
            std::memcpy(&half, p, 2);
            x = t.type == MaskType::bf16 ? from_bf16(half) : from_f16(half);
          }
          may = x != -INFINITY;
          plain = x == 0.0f;
        }
        some |= may;
        every &= plain;
      }
    }
    out[i_k] = int8_t(int(some) + int(some && every));
  }
}

}  // namespace sparge
