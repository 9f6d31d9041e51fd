// The AMX schedule over a scalar emulation of the tile unit; for tests.
#define SPARGE_TILES
#define SPARGE_TILES_IN_PLAIN_CODE
#include "arch/portable.h"
#include "arch/tiles.h"
#include "kernels.h"

namespace sparge {
extern const Kernels kernels_tiles = kTable;
}
