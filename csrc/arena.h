// Scratch layouts: arrays placed one after another in one buffer.
#pragma once

#include <cstddef>

namespace sparge {
namespace {

// Each array starts on a cache line. Without a buffer the arena only counts bytes.
struct Arena {
  char* base;
  size_t used = 0;

  template <class T>
  T* take(size_t n) {
    T* array = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (n * sizeof(T) + 63) / 64 * 64;
    return array;
  }
};

}  // namespace
}  // namespace sparge
