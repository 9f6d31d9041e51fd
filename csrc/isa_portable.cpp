#include "arch/portable.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_portable = kTable;
}
