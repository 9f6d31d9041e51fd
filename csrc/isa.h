// The instruction sets this library was built with, and those this machine has.
#pragma once

#include "args.h"

namespace sparge {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool (*available)();
};

// Best first. The numbers are the same everywhere (backends/cpu/library.py has the names); the last
// two run on any machine.
const Isa* isas(int* count);

}  // namespace sparge
