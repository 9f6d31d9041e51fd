#define SPARGE_TILES
#include "arch/avx512.h"
#include "arch/tiles.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_amx = kTable;
}
