#include "isa.h"

#ifdef SPARGE_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparge {
namespace {

#ifdef SPARGE_X86
// Registers that the system saves, as bits of XCR0.
constexpr uint64_t kVectors = 0x6, kWideVectors = 0xe6, kTiles = 0x60000;

uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}
// Linux grants tile registers on request, once per process.
bool may_use_tiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
uint32_t find_features() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const auto saves = [saved = saved_registers()](uint64_t bits) { return (saved & bits) == bits; };
  const bool avx2 = b >> 5 & 1, foundation = b >> 16 & b >> 17 & b >> 30 & b >> 31 & 1;
  const bool vnni = c >> 11 & 1, tiles = d >> 22 & d >> 24 & d >> 25 & 1, more = a >= 1;
  uint32_t found = 0;
  if (avx2 && fma && f16c && saves(kVectors)) found |= kAvx2;
  if (found && foundation && vnni && saves(kWideVectors)) found |= kAvx512;
  if (more && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) found |= kBf16;
  if (tiles && saves(kTiles) && may_use_tiles()) found |= kAmx;
  return found;
}
#else
uint32_t find_features() { return 0; }
#endif

}  // namespace

uint32_t features() {
  static const uint32_t found = find_features();
  return found;
}

}  // namespace sparge
