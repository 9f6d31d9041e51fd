// The instruction sets this library was built with, and those this machine has.
#pragma once

#include "args.h"

namespace sparge {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*available)();
};

// Best first, numbered the same everywhere (src/sparge/native.py knows the names); the last two
// run anywhere.
const Isa* isas(int* count);

}  // namespace sparge
