// Scalar conversions of bf16 and fp16.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sparge {
namespace {

inline float from_bf16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// Rounded to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, m = h & 1023;
  uint32_t bits;
  float x;
  if (exponent == 0) {
    x = float(m) * 0x1p-24f;
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | m << 13;
  }
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint16_t to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: let the adder round
    float small;
    std::memcpy(&small, &bits, 4);
    small += 0.5f;
    std::memcpy(&bits, &small, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}

}  // namespace
}  // namespace sparge
