// Products on the tile unit, for two row groups (32 queries) at once.
#pragma once

#include "product.h"

namespace sparge {
namespace {

#ifdef SPARGE_TILES
constexpr bool kTiles = true;

// Scores of 16 keys: a tile of K against the tiles of both groups' queries, which stay in
// registers 4 … 7 over the four quarters of a block where they fit (16 or 32 steps).
template <Product P>
inline void tile_scores(const Words& key, int quarter, const float* q, int steps, float* c0,
                        float* c1) {
  const char* k = key.data + quarter * 16 * key.pitch;
  const float* q1 = q + steps * kLanes;
  const bool resident = steps <= 32;
  if (resident && quarter == 0) {
    TILE_LOAD(4, q, 64);
    TILE_LOAD(5, q1, 64);
    if (steps == 32) {
      TILE_LOAD(6, q + 16 * kLanes, 64);
      TILE_LOAD(7, q1 + 16 * kLanes, 64);
    }
  }
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (resident) {
    TILE_LOAD(2, k, key.pitch);
    if (steps == 32) TILE_LOAD(3, k + 64, key.pitch);
    if constexpr (P == Product::tile_i8) {
      TILE_I8I8(0, 2, 4);
      TILE_I8I8(1, 2, 5);
      if (steps == 32) {
        TILE_I8I8(0, 3, 6);
        TILE_I8I8(1, 3, 7);
      }
    } else {
      TILE_BF16(0, 2, 4);
      TILE_BF16(1, 2, 5);
      if (steps == 32) {
        TILE_BF16(0, 3, 6);
        TILE_BF16(1, 3, 7);
      }
    }
  } else {
    for (int s = 0; s < steps; s += 16) {
      TILE_LOAD(2, k + s * 4, key.pitch);
      TILE_LOAD(4, q + s * kLanes, 64);
      TILE_LOAD(5, q1 + s * kLanes, 64);
      if constexpr (P == Product::tile_i8) {
        TILE_I8I8(0, 2, 4);
        TILE_I8I8(1, 2, 5);
      } else {
        TILE_BF16(0, 2, 4);
        TILE_BF16(1, 2, 5);
      }
    }
  }
  TILE_STORE(0, c0 + quarter * 16 * kLanes, 64);
  TILE_STORE(1, c1 + quarter * 16 * kLanes, 64);
}

// Adds one key block to 32 rows of both accumulators: V is [32 rows][64 keys] bf16. `first` loads
// the accumulators into registers 0 … 3, `last` stores them.
inline void tile_accumulate(const char* v, const float* p0, const float* p1, float* c0, float* c1,
                            bool first, bool last) {
  constexpr int kRow = kBlockK * 2;
  if (first) {
    TILE_LOAD(0, c0, 64);
    TILE_LOAD(1, c1, 64);
    TILE_LOAD(2, c0 + 16 * kLanes, 64);
    TILE_LOAD(3, c1 + 16 * kLanes, 64);
  }
  for (int s = 0; s < 2; ++s) {
    TILE_LOAD(4, v + 64 * s, kRow);
    TILE_LOAD(5, v + 64 * s + 16 * kRow, kRow);
    TILE_LOAD(6, p0 + 16 * kLanes * s, 64);
    TILE_LOAD(7, p1 + 16 * kLanes * s, 64);
    TILE_BF16(0, 4, 6);
    TILE_BF16(1, 4, 7);
    TILE_BF16(2, 5, 6);
    TILE_BF16(3, 5, 7);
  }
  if (last) {
    TILE_STORE(0, c0, 64);
    TILE_STORE(1, c1, 64);
    TILE_STORE(2, c0 + 16 * kLanes, 64);
    TILE_STORE(3, c1 + 16 * kLanes, 64);
  }
}

// The same with 8-bit P and V; the sums of this block alone, [2 groups][32 rows][16].
inline void tile_bytes(const char* v, const float* p0, const float* p1, float* sums) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  TILE_LOAD(4, v, kBlockK);
  TILE_LOAD(5, v + 16 * kBlockK, kBlockK);
  TILE_LOAD(6, p0, 64);
  TILE_LOAD(7, p1, 64);
  TILE_I8U8(0, 4, 6);
  TILE_I8U8(1, 4, 7);
  TILE_I8U8(2, 5, 6);
  TILE_I8U8(3, 5, 7);
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + 32 * kLanes, 64);
  TILE_STORE(2, sums + 16 * kLanes, 64);
  TILE_STORE(3, sums + 48 * kLanes, 64);
}
#else
constexpr bool kTiles = false;
template <Product P>
inline void tile_scores(const Words&, int, const float*, int, float*, float*) {}
inline void tile_accumulate(const char*, const float*, const float*, float*, float*, bool, bool) {}
inline void tile_bytes(const char*, const float*, const float*, float*) {}
#endif

}  // namespace
}  // namespace sparge
