// AMX: AVX-512, and a tile unit of eight registers of 16 rows x 64 bytes. C += A · B is the product
// of product.h for 16 rows of A at once.
#pragma once

#include "avx512.h"

#define SPARGE_TILES

namespace sparge {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "the unit reads 64 bytes");

}  // namespace
}  // namespace sparge

// Static storage: gcc assumes that loading a configuration reads only its first 8 bytes.
static const sparge::TileConfig kTileConfig;
#define TILE_BEGIN() _tile_loadconfig(&kTileConfig)
#define TILE_END() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
// gcc does not know that a tile load reads memory; the barrier completes earlier stores.
#define TILE_LOAD(t, p, stride)        \
  do {                                 \
    __asm__ volatile("" ::: "memory"); \
    _tile_loadd(t, p, stride);         \
  } while (0)
#define TILE_STORE(t, p, stride)       \
  do {                                 \
    _tile_stored(t, p, stride);        \
    __asm__ volatile("" ::: "memory"); \
  } while (0)
#define TILE_I8I8(c, a, b) _tile_dpbssd(c, a, b)
#define TILE_I8U8(c, a, b) _tile_dpbsud(c, a, b)
#define TILE_BF16(c, a, b) _tile_dpbf16ps(c, a, b)
