#include "isa.h"

#if defined(__x86_64__) && defined(SPARGE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparge {

extern const Kernels kernels_portable, kernels_tiles;

namespace {

bool always() { return true; }
[[maybe_unused]] bool never() { return false; }

#if defined(__x86_64__) && defined(SPARGE_X86)
uint64_t enabled_state() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}
struct Features {
  bool avx2 = false, avx512 = false, bf16 = false, amx = false;

  Features() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
    if (!osxsave) return;
    const uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const uint32_t highest = a;
    avx2 = (b >> 5 & 1) && fma && f16c && (state & 6) == 6;
    const bool foundation = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1);
    avx512 = avx2 && foundation && (c >> 11 & 1) && (state & 0xe6) == 0xe6;
    const bool tiles = (d >> 24 & 1) && (d >> 25 & 1) && (d >> 22 & 1);
    if (highest >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) bf16 = avx512 && (a >> 5 & 1);
    if (tiles && bf16 && (state & 0x60000) == 0x60000) {
      // Linux grants tile state on request, once per process.
      constexpr int kRequest = 0x1023, kTileData = 18;
      amx = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    }
  }
};
const Features& features() {
  static const Features found;
  return found;
}
bool has_avx2() { return features().avx2; }
bool has_avx512() { return features().avx512; }
bool has_bf16() { return features().bf16; }
bool has_amx() { return features().amx; }
#endif

}  // namespace

#if defined(__x86_64__) && defined(SPARGE_X86)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_vnni, kernels_amx;
#endif

const Isa* isas(int* count) {
  static const Isa all[] = {
#if defined(__x86_64__) && defined(SPARGE_X86)
      {"amx", &kernels_amx, has_amx},
      {"avx512", has_bf16() ? &kernels_avx512 : &kernels_avx512_vnni, has_avx512},
      {"avx2", &kernels_avx2, has_avx2},
#else
      {"amx", nullptr, never},
      {"avx512", nullptr, never},
      {"avx2", nullptr, never},
#endif
      {"portable", &kernels_portable, always},
      {"tiles", &kernels_tiles, always},
  };
  *count = int(sizeof(all) / sizeof(all[0]));
  return all;
}

}  // namespace sparge
