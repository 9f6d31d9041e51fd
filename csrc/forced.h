// Blocks that are kept whatever is predicted, as rules/forced_blocks.py says.
#pragma once

#include <algorithm>

#include "args.h"

namespace sparge {

struct Forced {
  int64_t sink_blocks, window;
  const int64_t* protect;  // [n_protected][2] token ranges, sliced like Python
  int64_t n_protected;

  // One query block, [n_k].
  void write(const Shape& s, const TokenMask& t, int64_t i_q, bool* row) const {
    const int64_t n_k = s.n_k(), Lk = s.Lk;
    std::fill(row, row + n_k, false);
    std::fill(row, row + std::min(sink_blocks, n_k), true);
    // The block's own positions, and `window` key blocks more to each side.
    const int64_t first = i_q * kBlockQ + t.offset;
    const int64_t last = std::min((i_q + 1) * kBlockQ, s.Lq) - 1 + t.offset;
    if ((t.is_causal || window) && last >= 0 && first < Lk) {
      const int64_t low = std::max<int64_t>(first, 0) / kBlockK - window;
      const int64_t high = std::min(last, Lk - 1) / kBlockK + window;
      std::fill(row + std::max<int64_t>(low, 0), row + std::min(high + 1, n_k), true);
    }
    for (int64_t p = 0; p < n_protected; ++p) {
      const int64_t start = place(protect[2 * p], Lk), stop = place(protect[2 * p + 1], Lk);
      if (start >= stop) continue;
      std::fill(row + start / kBlockK, row + (stop + kBlockK - 1) / kBlockK, true);
      // Protected queries read every key.
      const int64_t first_row = std::max<int64_t>(start - t.offset, 0);
      const int64_t last_row = std::min(stop - t.offset, s.Lq);
      if (first_row < last_row && i_q >= first_row / kBlockQ && i_q * kBlockQ < last_row)
        std::fill(row, row + n_k, true);
    }
  }

 private:
  static int64_t place(int64_t x, int64_t L) {
    return x < 0 ? std::max<int64_t>(x + L, 0) : std::min(x, L);
  }
};

}  // namespace sparge
