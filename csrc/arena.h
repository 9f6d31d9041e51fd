// Scratch layouts: arrays placed one after another in one buffer.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace sparge {

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;
inline Buffer allocate(size_t bytes) {
  return Buffer(static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64)));
}

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

// What is given for an array, or memory for it where it is wanted.
template <class T>
T* placed(Arena* arena, T* given, bool wanted, int64_t n) {
  return given ? given : wanted ? arena->take<T>(size_t(n)) : nullptr;
}

}  // namespace
}  // namespace sparge
