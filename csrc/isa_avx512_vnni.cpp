// AVX-512 without the bf16 instructions: 16-bit products run in fp32.
#include "arch/avx512.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_avx512_vnni = kTable;
}
