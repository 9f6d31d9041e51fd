// The operations of amx.h in plain C++, so that the schedule for the tile unit can be tested on any
// machine.
#pragma once

#include "portable.h"

#define SPARGE_TILES

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
