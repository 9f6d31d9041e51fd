// Which pooled entries a query block reads: those of the blocks that it skips, where every row may
// attend the whole block. 64 entries are visited at once, as if they were one more key block: tile
// t has the number n_k + t in the list of what is visited.
//
// Not inlined, and not members: the compiler keeps the state of a walk in registers as long as its
// address is not passed on.
#pragma once

#include "product.h"

namespace sparge {
namespace {

// Writes the kept blocks and then the tiles of pooled entries to `visited`, and to `pools` [n_k]
// whether a block is pooled; returns how many are visited.
SPARGE_NOINLINE int visit_pooled(const AttendArgs& a, int64_t b, int64_t h, int64_t i_q,
                                 const int32_t* kept, int n_kept, uint8_t* pools,
                                 int32_t* visited) {
  const int64_t n_k = a.shape.n_k(), blocks_per_tile = a.pool_group;
  std::memcpy(visited, kept, size_t(n_kept) * sizeof(int32_t));
  int n = n_kept, at = 0;
  for (int64_t i_k = 0; i_k < n_k; ++i_k) {
    const bool keeps = at < n_kept && kept[at] == i_k;
    at += keeps;
    pools[i_k] = !keeps && a.tokens.kind(a.shape, b, h, i_q, i_k) == kOpen;
    const int64_t tile = n_k + i_k / blocks_per_tile;
    if (pools[i_k] && (n == 0 || visited[n - 1] != tile)) visited[n++] = int32_t(tile);
  }
  return n;
}

// What is added to the scores of a tile: log2 of the keys of each entry, -inf where it is not read.
SPARGE_NOINLINE void find_entry_bias(const AttendArgs& a, const uint8_t* pools, int64_t tile,
                                     float* bias) {
  const int64_t group = a.pool_group, per_block = kBlockK / group;
  const float log_group = float(std::log2(double(group)));
  for (int64_t j = 0; j < kBlockK; ++j) {
    const int64_t e = tile * kBlockK + j, keys = a.shape.Lk - e * group;
    const bool reads = keys > 0 && pools[e / per_block];
    bias[j] = !reads ? -INFINITY : keys >= group ? log_group : float(std::log2(double(keys)));
  }
}

}  // namespace
}  // namespace sparge
