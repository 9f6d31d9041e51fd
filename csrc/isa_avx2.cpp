#include "arch/avx2.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_avx2 = kTable;
}
