// Compiled once for each instruction set, as kernels.cpp is: SPARGE_ARCH is its header,
// SPARGE_OPERATIONS the name of its table.
#include "operations.h"

#include SPARGE_ARCH

#include <type_traits>

#include "../read_rows.h"
#include "../tile_product.h"

namespace sparge {
namespace {

inline int32_t* words_of(float* p) { return reinterpret_cast<int32_t*>(p); }

template <Product P>
void multiply(const float* a, int64_t pitch, int64_t m, const float* b, int steps, float* c,
              bool add) {
  alignas(64) float panels[kBlockK * kMaxDim];
  to_panels(a, pitch, m, steps, panels);
  product<P>(panels_of(panels, steps), m, b, steps, c, add);
}
template <Product P>
void multiply_rows(const float* a, int64_t, int64_t m, const float* b, int steps, float* c,
                   bool add) {
  product_in_place<P>(reinterpret_cast<const char*>(a), m, b, steps, c, add);
}

#ifdef SPARGE_TILES
template <Product P>
void scores(const char* key, int64_t pitch, const float* q, int steps, float* c) {
  TILE_BEGIN();
  for (int quarter = 0; quarter < 4; ++quarter)
    tile_scores<P>({key, pitch}, quarter, q, steps, c, c + kBlockK * kLanes);
  TILE_END();
}
constexpr TileScores kTileI8 = scores<Product::tile_i8>, kTileBf16 = scores<Product::tile_bf16>;
// Two key blocks of 64 keys each.
void accumulate(const char* v, const float* p, float* c) {
  constexpr int kBlock = 32 * kBlockK * 2, kWords = kBlockK / 2 * kLanes;
  TILE_BEGIN();
  for (int i = 0; i < 2; ++i, v += kBlock, p += 2 * kWords)
    tile_accumulate(v, p, p + kWords, c, c + 32 * kLanes, i == 0, i == 1);
  TILE_END();
}
void bytes(const char* v, const float* p, float* sums) {
  TILE_BEGIN();
  tile_bytes(v, p, p + kBlockK / 4 * kLanes, sums);
  TILE_END();
}
#else
constexpr TileScores kTileI8 = nullptr, kTileBf16 = nullptr;
constexpr decltype(Operations::tile_accumulate) accumulate = nullptr;
constexpr decltype(Operations::tile_bytes) bytes = nullptr;
#endif

template <Product P, bool kHas>
constexpr Multiply multiply_if() {
  if constexpr (kHas) return multiply<P>;
  return nullptr;
}

constexpr Operations table() {
  Operations o{};
  o.add = [](const float* a, const float* b, float* out) { store(out, load(a) + load(b)); };
  o.subtract = [](const float* a, const float* b, float* out) { store(out, load(a) - load(b)); };
  o.multiply = [](const float* a, const float* b, float* out) { store(out, load(a) * load(b)); };
  o.divide = [](const float* a, const float* b, float* out) { store(out, load(a) / load(b)); };
  o.max = [](const float* a, const float* b, float* out) { store(out, max(load(a), load(b))); };
  o.min = [](const float* a, const float* b, float* out) { store(out, min(load(a), load(b))); };
  o.abs = [](const float* a, float* out) { store(out, abs(load(a))); };
  o.round = [](const float* a, float* out) { store(out, round(load(a))); };
  o.sqrt = [](const float* a, float* out) { store(out, sqrt(load(a))); };
  o.fma = [](const float* a, const float* b, const float* c, float* out) {
    store(out, fma(load(a), load(b), load(c)));
  };
  o.less = [](const float* a, const float* b) { return uint32_t(less(load(a), load(b))); };
  o.at_least = [](const float* a, const float* b) { return uint32_t(at_least(load(a), load(b))); };
  o.select = [](uint32_t lanes, const float* yes, const float* no, float* out) {
    store(out, select(lanes, load(yes), load(no)));
  };
  o.lane_max = [](const float* a) { return lane_max(load(a)); };
  o.lane_sum = [](const float* a) { return lane_sum(load(a)); };
  o.swap_1 = [](const float* a, float* out) { store(out, swap_lanes<1>(load(a))); };
  o.swap_2 = [](const float* a, float* out) { store(out, swap_lanes<2>(load(a))); };
  o.swap_4 = [](const float* a, float* out) { store(out, swap_lanes<4>(load(a))); };
  o.swap_8 = [](const float* a, float* out) { store(out, swap_lanes<8>(load(a))); };
  o.broadcast = [](float x, float* out) { store(out, broadcast(x)); };
  o.zeros = [](float* z, int32_t* i) { store(z, zero()), istore(i, izero()); };
  o.to_float = [](const int32_t* a, float* out) { store(out, to_float(iload(a))); };
  o.as_words = [](const float* a, int32_t* out) { istore(out, as_words(load(a))); };
  o.split = [](const float* x, float* f) {
    F32x16 whole;
    store(f, split(load(x), &whole));
  };
  o.raise = [](const float* x, const float* p, float* out) {
    F32x16 whole;
    split(load(x), &whole);
    store(out, raise<true>(load(p), whole, load(x)));
  };
  o.exp2_4 = [](const float* x, float* out) { store(out, exp2<4>(load(x))); };
  o.exp2_6 = [](const float* x, float* out) { store(out, exp2<6>(load(x))); };
  o.exp2_codes = [](const float* x, float* out) { store(out, exp2<4, false, 255>(load(x))); };
  o.load_bf16 = [](const void* in, float* out) { store(out, load_bf16(in)); };
  o.load_f16 = [](const void* in, float* out) { store(out, load_f16(in)); };
  o.load_i8 = [](const void* in, float* out) {
    store(out, load_i8(static_cast<const int8_t*>(in)));
  };
  o.store_bf16 = [](const float* in, void* out) { store_bf16(out, load(in)); };
  o.store_f16 = [](const float* in, void* out) { store_f16(out, load(in)); };
  o.store_i8 = [](const float* in, void* out) { store_i8(static_cast<int8_t*>(out), load(in)); };
  o.widen_i8 = [](const int8_t* in, void* out) { widen_i8(in, out); };
  o.pair_bf16 = [](const float* low, const float* high, float* out) {
    istore(words_of(out), pair_bf16(load(low), load(high)));
  };
  o.pair_i16 = [](const float* low, const float* high, float* out) {
    istore(words_of(out), pair_i16(load(low), load(high)));
  };
  o.pair_codes = [](const int8_t* low, const int8_t* high, float* out) {
    istore(words_of(out), pair_codes(low, high));
  };
  o.quad_u8 = [](const float* x, float* out) {
    istore(words_of(out), quad_u8(load(x), load(x + 16), load(x + 32), load(x + 48)));
  };
  o.transpose = transpose;
  o.rows_at_once = kRowsAtOnce;
  o.store_panels = [](float* out, int64_t pitch, const int32_t* words) {
    store_panels(out, pitch, iload(words));
  };
  o.sum_i8 = sum_i8;
  o.f32 = multiply<Product::f32>;
  o.i16 = multiply<Product::i16>;
  o.u8i8 = multiply_if<Product::u8i8, kHasBytes>();
  o.bf16 = multiply_if<Product::bf16, kHasPairs>();
  o.f32_rows = multiply_rows<Product::f32>;
  o.i16_rows = multiply_rows<Product::i16>;
  o.tile_i8 = kTileI8;
  o.tile_bf16 = kTileBf16;
  o.tile_accumulate = accumulate;
  o.tile_bytes = bytes;
  o.read_row = [](const Rows& x, int64_t n, float* out) { read_row(x, x.data, n, out); };
  o.write_row = write_row;
  o.half_of = [](const float* a, float* out) { store(out, half_of(load(a))); };
  return o;
}

}  // namespace

constexpr Operations kTable = table();
extern const Operations SPARGE_OPERATIONS = kTable;

}  // namespace sparge
