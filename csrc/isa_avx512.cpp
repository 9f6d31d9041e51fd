#include "arch/avx512.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_avx512 = kTable;
}
