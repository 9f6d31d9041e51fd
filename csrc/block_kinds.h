// The kind of every block of a row: no pair may attend, some may, or all may without a bias.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

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

// The kinds of all blocks under a mask of sizes [B, H], as tasks: rows of blocks. B is 0 without a
// mask.
struct KindMap {
  const Shape& s;
  int64_t B, H;

  // Where all rows of a mask are the same, one row of blocks holds for all.
  static bool same_rows(const TokenMask& t) { return t.stride_q == 0 && !t.is_causal; }
  int64_t size() const { return B * H * s.n_q() * s.n_k(); }
  // Tasks before those of group g of `groups`.
  int64_t tasks_before(const TokenMask& t, int64_t g, int64_t groups) const {
    return B * H * (same_rows(t) ? 1 : s.n_q()) * g / groups;
  }
  void run(const TokenMask& t, int64_t task, int8_t* kinds) const {
    const int64_t n_q = s.n_q(), n_k = s.n_k(), rows = same_rows(t) ? 1 : n_q;
    const int64_t head = task / rows, i_q = task % rows;
    int8_t* row = kinds + (head * n_q + i_q) * n_k;
    kinds_of_row(t, head / H, head % H, i_q, s.Lq, s.Lk, row);
    for (int64_t i = 1; rows == 1 && i < n_q; ++i) std::copy(row, row + n_k, row + i * n_k);
  }
  void attach(const int8_t* kinds, TokenMask* t) const {
    t->kinds = kinds;
    t->kinds_q = s.n_k();
    t->kinds_h = H == 1 ? 0 : s.n_q() * s.n_k();
    t->kinds_b = B == 1 ? 0 : H * s.n_q() * s.n_k();
  }
};

// A caller's lists of kept blocks, rows `start` … `stop` of them, are what kernels rely on.
inline void check_lists(const int32_t* counts, const int32_t* indices, int64_t start, int64_t stop,
                        int64_t n_k) {
  for (int64_t i = start; i < stop; ++i) {
    const int32_t *list = indices + i * n_k, count = counts[i];
    bool good = count >= 0 && count <= n_k;
    for (int64_t j = 0; good && j < count; ++j)
      good = list[j] < n_k && list[j] > (j ? list[j - 1] : -1);
    if (!good)
      throw std::runtime_error(
          "sparge_cpu: counts and indices must be lists of ascending key "
          "blocks in 0 … " +
          std::to_string(n_k - 1) + "; list " + std::to_string(i) + " is not");
  }
}

}  // namespace sparge
