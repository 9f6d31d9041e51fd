// Operations of the tile unit: eight registers of 16 rows x 64 bytes. C += A · B is the product of
// product.h for 16 rows of A at once. SPARGE_TILES_IN_PLAIN_CODE replaces the unit by a scalar
// emulation, so that its schedule can be tested on any machine.
#pragma once

#include <cstdint>
#include <cstring>

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

#ifndef SPARGE_TILES_IN_PLAIN_CODE

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

#else

namespace sparge {
namespace {

struct Tiles {
  alignas(64) char t[8][16][64];

  void load(int i, const void* p, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(t[i][r], static_cast<const char*>(p) + r * stride, 64);
  }
  void store(int i, void* p, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(p) + r * stride, t[i][r], 64);
  }
  template <class A, class B>
  void bytes(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, &t[c][m][4 * n], 4);
        for (int k = 0; k < 64; ++k)
          sum += int32_t(A(t[a][m][k])) * int32_t(B(t[b][k / 4][4 * n + k % 4]));
        std::memcpy(&t[c][m][4 * n], &sum, 4);
      }
  }
  void bf16(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 16; ++n) {
        float sum;
        std::memcpy(&sum, &t[c][m][4 * n], 4);
        for (int k = 0; k < 32; ++k) {
          uint16_t x, y;
          std::memcpy(&x, &t[a][m][2 * k], 2);
          std::memcpy(&y, &t[b][k / 2][4 * n + 2 * (k % 2)], 2);
          sum += from_bf16(x) * from_bf16(y);
        }
        std::memcpy(&t[c][m][4 * n], &sum, 4);
      }
  }
};
inline Tiles& tiles() {
  static thread_local Tiles all;
  return all;
}

}  // namespace
}  // namespace sparge

#define TILE_BEGIN() std::memset(&tiles(), 0xff, sizeof(Tiles))
#define TILE_END() std::memset(&tiles(), 0xff, sizeof(Tiles))
#define TILE_ZERO(i) std::memset(tiles().t[i], 0, sizeof(tiles().t[i]))
#define TILE_LOAD(i, p, stride) tiles().load(i, p, stride)
#define TILE_STORE(i, p, stride) tiles().store(i, p, stride)
#define TILE_I8I8(c, a, b) tiles().bytes<int8_t, int8_t>(c, a, b)
#define TILE_I8U8(c, a, b) tiles().bytes<int8_t, uint8_t>(c, a, b)
#define TILE_BF16(c, a, b) tiles().bf16(c, a, b)

#endif
