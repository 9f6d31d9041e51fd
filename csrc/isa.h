// The instruction sets: what each needs, and which of them this machine has.
#pragma once

#include "args.h"

namespace sparge {

// What a processor has and its system allows, one bit each.
enum Feature : uint32_t {
  kAvx2 = 1,    // with FMA and F16C
  kAvx512 = 2,  // F, BW, DQ, VL and VNNI
  kBf16 = 4,    // of AVX-512
  kAmx = 8,     // tiles of int8 and bf16
};
uint32_t features();  // of this machine

// All of them, best first; a position is the number that the ops take. To add one: a header in
// arch/, a line here and a line in isas.cmake.
//   processor it is built for, name, features it needs, whether for tests only, description
#define SPARGE_ISAS(X)                                                                       \
  X(X86, amx, kAvx512 | kBf16 | kAmx, false, "tiles of int8 and bf16; AVX-512 for the rest") \
  X(X86, avx512_bf16, kAvx512 | kBf16, false, "AVX-512 with int8 (VNNI) and bf16 products")  \
  X(X86, avx512, kAvx512, false, "AVX-512 with int8 products (VNNI); 16-bit ones in fp32")   \
  X(X86, avx2, kAvx2, false, "AVX2 with FMA; int8 products in 16 bits, 16-bit ones in fp32") \
  X(ANY, portable, 0, false, "plain C++, for every processor")                               \
  X(ANY, tiles, 0, true, "the schedule of amx in plain C++, over an emulation of the tile unit")

struct Isa {
  const char *name, *description;
  uint32_t needs;  // features
  bool for_tests;
  const Kernels* kernels;  // null if this library is for another processor
};

#ifdef SPARGE_X86
#define SPARGE_ON_X86(kernels) &kernels
#else
#define SPARGE_ON_X86(kernels) nullptr
#endif
#define SPARGE_ON_ANY(kernels) &kernels
#define SPARGE_DECLARE(processor, name, needs, for_tests, description) \
  extern const Kernels kernels_##name;
#define SPARGE_ENTRY(processor, name, needs, for_tests, description) \
  {#name, description, needs, for_tests, SPARGE_ON_##processor(kernels_##name)},
SPARGE_ISAS(SPARGE_DECLARE)
inline constexpr Isa kIsas[] = {SPARGE_ISAS(SPARGE_ENTRY)};
constexpr int kIsaCount = int(sizeof(kIsas) / sizeof(kIsas[0]));

inline bool is_available(const Isa& isa) { return isa.kernels && (isa.needs & ~features()) == 0; }

}  // namespace sparge
