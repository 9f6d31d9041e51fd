// The operations of every instruction set (arch/*.h), `portable` among them, against plain scalar
// code: over edge values (signed zeros, denormals, the largest numbers, infinities, NaN), random
// bits and odd sizes.
//
// All bits must agree, so those of two sets agree, too; with four exceptions. A NaN is any NaN. A
// sum of n products is within n · 2^-23 · Σ|terms|: only some sets fuse multiply and add. 2^x is
// within 3e-6 (degree 4) or 4e-7 (degree 6) of the true value. bf16 instructions flush denormals.
//
// Needs neither Python nor torch; CMakeLists.txt here says how to run it, also in an emulator.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../isa.h"
#include "operations.h"

namespace sparge {

#define SPARGE_DECLARE_OPERATIONS(processor, name, needs, for_tests, description) \
  extern const Operations operations_##name;
SPARGE_ISAS(SPARGE_DECLARE_OPERATIONS)

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<int8_t>;

std::mt19937 random_bits(7);
int below(int n) { return int(random_bits() % unsigned(n)); }
double between(double low, double high) {
  return low + (high - low) * double(random_bits()) / 4294967295.0;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// --- values -------------------------------------------------------------------------------------

const Floats& edges() {
  static const Floats all = [] {
    Floats x = {0.0f, 1.0f, 0.5f, 1.5f, 2.5f, 3.5f, 127.0f, 127.5f, 128.0f, 255.0f, 8388607.5f,
                8388609.0f, FLT_MIN, 1e-40f, 1.4e-45f, FLT_MAX, INFINITY, NAN,
                // ends of fp16 and of bf16, and the numbers that round to them or past them
                65504.0f, 65519.996f, 65520.0f, 0x1p-14f, 0x1p-24f, 0x1p-25f, 0x1.8p-25f,
                3.3895314e38f, 3.3961775e38f, 0x1.008p0f, 0x1.018p0f, 0x1.002p0f, 0x1.006p0f};
    for (size_t i = 0, n = x.size(); i < n; ++i) x.push_back(-x[i]);
    return x;
  }();
  return all;
}
// Any bits; a sixth of them are edges.
float any_number() {
  if (below(6) == 0) return edges()[size_t(below(int(edges().size())))];
  return from_bits(random_bits());
}
// As attention has them: finite, neither huge nor tiny.
float usual_number() { return float(between(-8, 8)); }
template <class F>
Floats numbers(size_t n, const F& number) {
  Floats x(n);
  for (float& one : x) one = number();
  return x;
}
Bytes bytes(size_t n) {
  Bytes x(n);
  for (int8_t& one : x) one = below(8) ? int8_t(random_bits()) : below(2) ? -128 : 127;
  return x;
}
// Pairs of edges, each with each, and pairs of any numbers; a multiple of 16.
void pairs(Floats* a, Floats* b) {
  for (float x : edges())
    for (float y : edges()) a->push_back(x), b->push_back(y);
  while (a->size() < 16000) a->push_back(any_number()), b->push_back(any_number());
}

// --- the same in plain code ---------------------------------------------------------------------

float bf16_number(uint16_t h) { return from_bits(uint32_t(h) << 16); }
// The nearer of the two neighbours, the even one of two equally near.
uint16_t nearest_bf16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const uint16_t low = uint16_t(bits_of(x) >> 16), high = uint16_t(low + 1);
  if (std::isinf(x)) return low;
  // The neighbour of the largest number is infinity; for rounding it is the next power of two.
  const auto value = [](uint16_t h) {
    return (h & 0x7fff) == 0x7f80 ? std::copysign(0x1p128, (h & 0x8000) ? -1.0 : 1.0)
                                  : double(bf16_number(h));
  };
  const double to_low = std::fabs(double(x) - value(low)),
               to_high = std::fabs(double(x) - value(high));
  return to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
}
float f16_number(uint16_t h) {
  const int exponent = h >> 10 & 31, m = h & 1023;
  const double size = exponent == 31 ? (m ? double(NAN) : double(INFINITY))
                      : exponent     ? std::ldexp(1024 + m, exponent - 25)
                                     : std::ldexp(m, -24);
  return float(h & 0x8000 ? -size : size);
}
uint16_t nearest_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(double(x));
  if (std::isnan(x)) return 0x7e00;
  if (size >= 65520.0) return uint16_t(sign | 0x7c00);
  int exponent;
  std::frexp(size, &exponent);  // size < 2^exponent
  const int unit = size > 0 ? std::max(exponent - 11, -24) : -24;
  const double m = std::nearbyint(std::ldexp(size, -unit));  // up to 2^11
  return uint16_t(sign | uint16_t((unit + 24) * 1024 + int(m)));
}
double nearest_code(float x) { return std::isnan(x) ? 0.0 : std::nearbyint(double(x)); }
float word_of(uint32_t low, uint32_t high) { return from_bits((low & 0xffff) | high << 16); }

// The numbers of a word, as a product takes them.
enum class Word { f32, bf16, i16, i8, u8 };
double number_of(Word type, float word, int i) {
  const uint32_t bits = bits_of(word);
  switch (type) {
    case Word::f32:
      return double(word);
    case Word::bf16:
      return double(bf16_number(uint16_t(bits >> 16 * i)));
    case Word::i16:
      return double(int16_t(bits >> 16 * i));
    case Word::i8:
      return double(int8_t(bits >> 8 * i));
    default:
      return double(uint8_t(bits >> 8 * i));
  }
}
int numbers_in(Word type) {
  return type == Word::f32 ? 1 : type == Word::bf16 || type == Word::i16 ? 2 : 4;
}
bool is_integer(Word type) { return type != Word::f32 && type != Word::bf16; }

// --- verdicts -----------------------------------------------------------------------------------

int failures = 0, shown = 0;
std::string tested;  // the set, for messages

template <class... Parts>
void fail(const char* operation, const char* form, Parts... parts) {
  ++failures;
  if (++shown > 20) return;
  std::printf("FAILED: %s of %s: ", operation, tested.c_str());
  std::printf(form, parts...);
  std::printf("\n");
}
void expect_same(const char* operation, double of, double and_of, float got, float wanted) {
  if (bits_of(got) == bits_of(wanted) || (std::isnan(got) && std::isnan(wanted))) return;
  fail(operation, "of %g and %g is %g (%08x), must be %g (%08x)", of, and_of, double(got),
       bits_of(got), double(wanted), bits_of(wanted));
}
void expect_near(const char* operation, double of, float got, double wanted, double tolerance) {
  if (std::isfinite(wanted) ? std::fabs(double(got) - wanted) <= tolerance
      : std::isnan(wanted)  ? std::isnan(got)
                            : double(got) == wanted)
    return;
  fail(operation, "of %.9g is %.9g, must be %.9g +- %.2g", of, double(got), wanted, tolerance);
}

// --- lanes --------------------------------------------------------------------------------------

template <class F>
void check_binary(const char* name, Binary operation, const F& plain) {
  Floats a, b, out(kLanes);
  pairs(&a, &b);
  for (size_t i = 0; i < a.size(); i += kLanes) {
    operation(&a[i], &b[i], out.data());
    for (size_t j = 0; j < kLanes; ++j)
      expect_same(name, double(a[i + j]), double(b[i + j]), out[j], plain(a[i + j], b[i + j]));
  }
}
template <class F>
void check_unary(const char* name, Unary operation, const F& plain) {
  Floats a, b, out(kLanes);
  pairs(&a, &b);
  for (size_t i = 0; i < a.size(); i += kLanes) {
    operation(&a[i], out.data());
    for (size_t j = 0; j < kLanes; ++j)
      expect_same(name, double(a[i + j]), 0, out[j], plain(a[i + j]));
  }
}
template <class F>
void check_compare(const char* name, Compare operation, const F& plain) {
  Floats a, b;
  pairs(&a, &b);
  for (size_t i = 0; i < a.size(); i += kLanes) {
    const uint32_t lanes = operation(&a[i], &b[i]);
    for (size_t j = 0; j < kLanes; ++j)
      if (bool(lanes >> j & 1) != plain(a[i + j], b[i + j]))
        fail(name, "of %g and %g is wrong", double(a[i + j]), double(b[i + j]));
    if (lanes >> kLanes) fail(name, "sets bits beyond its 16 lanes: %x", lanes);
  }
}

void check_arithmetic(const Operations& o) {
  check_binary("+", o.add, [](float a, float b) { return a + b; });
  check_binary("-", o.subtract, [](float a, float b) { return a - b; });
  check_binary("*", o.multiply, [](float a, float b) { return a * b; });
  check_binary("/", o.divide, [](float a, float b) { return a / b; });
  // The second operand where either is NaN, or where they are equal, as zeros of both signs are.
  check_binary("max", o.max, [](float a, float b) { return a > b ? a : b; });
  check_binary("min", o.min, [](float a, float b) { return a < b ? a : b; });
  check_unary("abs", o.abs, [](float a) { return std::fabs(a); });
  check_unary("round", o.round, [](float a) { return std::nearbyint(a); });
  check_unary("sqrt", o.sqrt, [](float a) { return std::sqrt(a); });
  check_compare("less", o.less, [](float a, float b) { return a < b; });
  check_compare("at_least", o.at_least, [](float a, float b) { return a >= b; });
  for (int round = 0; round < 2000; ++round) {
    const Floats a = numbers(kLanes, any_number), b = numbers(kLanes, any_number);
    const Floats c = numbers(kLanes, any_number);
    Floats out(kLanes);
    o.fma(a.data(), b.data(), c.data(), out.data());
    for (size_t i = 0; i < kLanes; ++i) {
      const double product = double(a[i]) * double(b[i]), sum = product + double(c[i]);
      // A product that overflows is infinite where it is rounded before the sum.
      if (std::isfinite(product) && std::max(std::fabs(product), std::fabs(sum)) > 3.4e38) continue;
      const double size = std::fabs(product) + std::fabs(double(c[i]));
      expect_near("fma", double(a[i]), out[i], sum, size * 0x1p-23 + 0x1p-149);
    }
  }
}

void check_lanes(const Operations& o) {
  const struct {
    Unary operation;
    size_t distance;
  } swaps[] = {{o.swap_1, 1}, {o.swap_2, 2}, {o.swap_4, 4}, {o.swap_8, 8}};
  for (int round = 0; round < 2000; ++round) {
    const Floats a = numbers(kLanes, any_number), b = numbers(kLanes, any_number);
    Floats out(kLanes);
    std::vector<int32_t> words(kLanes), integers(kLanes);
    for (const auto& swap : swaps) {
      swap.operation(a.data(), out.data());
      for (size_t i = 0; i < kLanes; ++i)
        expect_same("swap_lanes", double(i), 0, out[i], a[i ^ swap.distance]);
    }
    // Bits beyond the 16 lanes mean nothing.
    const uint32_t lanes = random_bits();
    o.select(lanes, a.data(), b.data(), out.data());
    for (size_t i = 0; i < kLanes; ++i)
      expect_same("select", double(i), 0, out[i], lanes >> i & 1 ? a[i] : b[i]);
    o.broadcast(a[0], out.data());
    for (float x : out) expect_same("broadcast", 0, 0, x, a[0]);
    o.as_words(a.data(), words.data());
    if (std::memcmp(words.data(), a.data(), 64)) fail("as_words", "changes bits");
    for (int32_t& x : integers)
      x = below(8) ? int32_t(random_bits()) >> below(32) : below(2) ? INT32_MIN : INT32_MAX;
    o.to_float(integers.data(), out.data());
    for (size_t i = 0; i < kLanes; ++i)
      expect_same("to_float", integers[i], 0, out[i], float(integers[i]));
    o.zeros(out.data(), words.data());
    for (size_t i = 0; i < kLanes; ++i)
      if (bits_of(out[i]) || words[i]) fail("zero", "is not zero");

    // Sums by halves, in this order; maxima of numbers.
    Floats sums = numbers(kLanes, usual_number);
    const float sum = o.lane_sum(sums.data()), most = o.lane_max(sums.data());
    expect_same("lane_max", 0, 0, most, *std::max_element(sums.begin(), sums.end()));
    for (size_t n = 8; n; n /= 2)
      for (size_t i = 0; i < n; ++i) sums[i] += sums[i + n];
    expect_same("lane_sum", 0, 0, sum, sums[0]);
  }
  Floats low(kLanes, -INFINITY);
  expect_same("lane_max", -INFINITY, 0, o.lane_max(low.data()), -INFINITY);
}

// --- 2^x ----------------------------------------------------------------------------------------

void check_exp2(const Operations& o) {
  const Floats ends = {0.0f,        -0.0f,   127.0f,   126.99999f, -126.0f, -125.99999f,
                       -126.00001f, -149.5f, -FLT_MAX, -INFINITY,  NAN,     -1e-40f,
                       1e-40f,      -0.5f,   0.5f,     1.5f};
  for (int round = 0; round < 4000; ++round) {
    const Floats x = round ? numbers(kLanes, [] { return float(between(-140, 127)); }) : ends;
    const Floats p = numbers(kLanes, [] { return float(between(1, 2)); });
    Floats f(kLanes), raised(kLanes), low(kLanes), high(kLanes), codes(kLanes);
    o.split(x.data(), f.data());
    o.raise(x.data(), p.data(), raised.data());
    o.exp2_4(x.data(), low.data());
    o.exp2_6(x.data(), high.data());
    o.exp2_codes(x.data(), codes.data());
    for (size_t i = 0; i < kLanes; ++i) {
      const double of = double(x[i]), truth = of < -126 ? 0.0 : std::exp2(of);
      expect_near("exp2<4>", of, low[i], truth, truth * 3e-6);
      expect_near("exp2<6>", of, high[i], truth, truth * 4e-7);
      // Times 255, up to x = 0; not exactly zero below 2^-126, but as small.
      if (std::isnan(of) || (of >= -126 && of <= 0))
        expect_near("exp2 of codes", of, codes[i], truth * 255, truth * 255 * 3e-6);
      else if (of < 0)
        expect_near("exp2 of codes", of, codes[i], 0, 255 * 0x1p-125);
      if (std::isnan(of)) continue;
      // x is a whole number and f, in [0, 1] or [-1/2, 1/2]; raise multiplies by 2^whole.
      const double rest = of - double(f[i]), whole = std::nearbyint(rest);
      if (of < -126)
        expect_same("raise", of, double(p[i]), raised[i], 0.0f);
      else if (std::fabs(rest - whole) > 0x1p-24 || f[i] < -0.5f || f[i] > 1.0f)
        fail("split", "of %.9g leaves %.9g", of, double(f[i]));
      else
        expect_same("raise", of, double(p[i]), raised[i],
                    float(std::ldexp(double(p[i]), int(whole))));
    }
  }
}

// --- conversions and packing --------------------------------------------------------------------

void check_conversions(const Operations& o) {
  for (uint32_t first = 0; first < 0x10000; first += kLanes) {
    std::vector<uint16_t> halves(kLanes);
    for (size_t i = 0; i < kLanes; ++i) halves[i] = uint16_t(first + i);
    Floats wide(kLanes);
    o.load_bf16(halves.data(), wide.data());
    for (size_t i = 0; i < kLanes; ++i)
      expect_same("load_bf16", halves[i], 0, wide[i], bf16_number(halves[i]));
    o.load_f16(halves.data(), wide.data());
    for (size_t i = 0; i < kLanes; ++i)
      expect_same("load_f16", halves[i], 0, wide[i], f16_number(halves[i]));
  }
  Floats a, b;
  pairs(&a, &b);
  // Numbers about the range of fp16, and half-way between two of them.
  while (a.size() < 64000) {
    const float half = f16_number(uint16_t(random_bits())), next = std::nextafter(half, INFINITY);
    a.push_back(below(2) ? half : next);
    a.push_back(float(std::ldexp(between(-2, 2), below(45) - 28)));
    const uint16_t h = uint16_t(below(0x7bff));
    a.push_back(0.5f * (f16_number(h) + f16_number(uint16_t(h + 1))));
    a.push_back(from_bits(uint32_t(random_bits()) << 16 | 0x8000));
  }
  b.resize(a.size());
  for (size_t i = 0; i < a.size(); i += kLanes) {
    std::vector<uint16_t> halves(kLanes);
    o.store_bf16(&a[i], halves.data());
    for (size_t j = 0; j < kLanes; ++j)
      expect_same("store_bf16", double(a[i + j]), 0, bf16_number(halves[j]),
                  bf16_number(nearest_bf16(a[i + j])));
    o.store_f16(&a[i], halves.data());
    for (size_t j = 0; j < kLanes; ++j)
      expect_same("store_f16", double(a[i + j]), 0, f16_number(halves[j]),
                  f16_number(nearest_f16(a[i + j])));
    // Rounded to bf16; finite numbers stay finite.
    Floats rounded(kLanes);
    o.half_of(&a[i], rounded.data());
    for (size_t j = 0; j < kLanes; ++j) {
      const float x = a[i + j], near = bf16_number(nearest_bf16(x));
      const bool overflows = std::isfinite(x) && std::isinf(near);
      expect_same("half_of", double(x), 0, rounded[j],
                  overflows ? std::copysign(3.3895314e38f, x) : near);
    }
    Floats words(kLanes);
    o.pair_bf16(&a[i], &b[i], words.data());
    for (size_t j = 0; j < 2 * kLanes; ++j) {
      const float x = j % 2 ? b[i + j / 2] : a[i + j / 2];
      const float got = bf16_number(uint16_t(bits_of(words[j / 2]) >> (j % 2 ? 16 : 0)));
      const bool flushed = o.bf16 && std::fabs(x) < FLT_MIN && got == 0.0f;
      expect_same("pair_bf16", double(x), double(j % 2), got,
                  flushed ? std::copysign(0.0f, x) : bf16_number(nearest_bf16(x)));
    }
  }
}

void check_codes(const Operations& o) {
  for (int round = 0; round < 2000; ++round) {
    const Bytes codes = bytes(kLanes), others = bytes(kLanes), many = bytes(64);
    Floats wide(kLanes), words(kLanes);
    Bytes narrow(kLanes);
    std::vector<int16_t> widened(kLanes);
    o.load_i8(codes.data(), wide.data());
    o.store_i8(wide.data(), narrow.data());
    o.widen_i8(codes.data(), widened.data());
    o.pair_codes(codes.data(), others.data(), words.data());
    int32_t sum = 0;
    for (int8_t x : many) sum += x;
    expect_same("sum_i8", 0, 0, float(o.sum_i8(many.data())), float(sum));
    for (size_t i = 0; i < kLanes; ++i) {
      expect_same("load_i8", codes[i], 0, wide[i], float(codes[i]));
      expect_same("store_i8", codes[i], 0, narrow[i], codes[i]);
      expect_same("widen_i8", codes[i], 0, widened[i], codes[i]);
      const uint32_t low = uint16_t(codes[i]), high = uint16_t(others[i]);
      if (bits_of(words[i]) != (low | high << 16)) fail("pair_codes", "of %u and %u", low, high);
    }
    // Codes of P before they are rounded: 0 … 255. NaN, which its row's sum holds, becomes 0.
    const auto p = [] { return below(4) ? float(between(0, 255)) : float(below(511)) / 2; };
    Floats x = numbers(4 * kLanes, p);
    o.quad_u8(x.data(), words.data());
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t j = 0; j < 4; ++j)
        expect_same("quad_u8", double(x[16 * j + i]), 0, float(bits_of(words[i]) >> 8 * j & 255),
                    std::nearbyint(x[16 * j + i]));
    x[size_t(below(2 * kLanes))] = NAN;
    o.pair_i16(x.data(), &x[16], words.data());
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t j = 0; j < 2; ++j) {
        const float of = x[16 * j + i];
        expect_same("pair_i16", double(of), 0, float(bits_of(words[i]) >> 16 * j & 0xffff),
                    std::isnan(of) ? 0.0f : std::nearbyint(of));
      }
  }
}

void check_layouts(const Operations& o) {
  for (size_t in_row : {16, 17, 40})
    for (size_t out_row : {16, 19}) {
      // The memory ends with the last number that may be read or written.
      const Floats in = numbers(15 * in_row + 16, any_number);
      Floats out(15 * out_row + 16, -7.0f);
      o.transpose(in.data(), int64_t(in_row), out.data(), int64_t(out_row));
      for (size_t r = 0; r < 16; ++r) {
        for (size_t c = 0; c < 16; ++c)
          expect_same("transpose", double(r), double(c), out[c * out_row + r], in[r * in_row + c]);
        for (size_t c = 16; r < 15 && c < out_row; ++c)
          expect_same("transpose", double(r), double(c), out[r * out_row + c], -7.0f);
      }
    }
  const size_t rows = size_t(o.rows_at_once), panels = kLanes / rows, pitch = rows + 5;
  Floats out((panels - 1) * pitch + rows, -7.0f);
  std::vector<int32_t> words(kLanes);
  for (size_t i = 0; i < kLanes; ++i) words[i] = int32_t(random_bits());
  o.store_panels(out.data(), int64_t(pitch), words.data());
  for (size_t i = 0; i < kLanes; ++i)
    if (std::memcmp(&out[i / rows * pitch + i % rows], &words[i], 4))
      fail("store_panels", "misplaces word %zu", i);
}

// --- products -----------------------------------------------------------------------------------

// C[m][lane], in double; `sizes` are the sums of the terms' sizes.
struct Sums {
  std::vector<double> values, sizes;
  int terms = 0;
};
Sums product_of(Word a_type, Word b_type, const char* a, size_t pitch, size_t m, const float* b,
                size_t steps, const float* c) {
  const int per = numbers_in(a_type);
  Sums sums{std::vector<double>(m * kLanes), std::vector<double>(m * kLanes), int(steps) * per + 1};
  for (size_t r = 0; r < m; ++r)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      double sum = 0, size = 0;
      if (c) {
        int32_t whole;
        std::memcpy(&whole, &c[r * kLanes + lane], 4);
        sum = is_integer(a_type) ? double(whole) : double(c[r * kLanes + lane]);
        size = std::fabs(sum);
      }
      for (size_t s = 0; s < steps; ++s)
        for (int i = 0; i < per; ++i) {
          float word;
          std::memcpy(&word, a + r * pitch + 4 * s, 4);
          const double term =
              number_of(a_type, word, i) * number_of(b_type, b[s * kLanes + lane], i);
          sum += term;
          size += std::fabs(term);
        }
      sums.values[r * kLanes + lane] = sum;
      sums.sizes[r * kLanes + lane] = size;
    }
  return sums;
}
void expect_sums(const char* name, bool integers, const float* got, const Sums& wanted) {
  for (size_t i = 0; i < wanted.values.size(); ++i) {
    int32_t whole;
    std::memcpy(&whole, &got[i], 4);
    if (!integers)
      expect_near(name, double(i), got[i], wanted.values[i],
                  wanted.terms * wanted.sizes[i] * 0x1p-23);
    else if (double(whole) != wanted.values[i])
      fail(name, "%zu of %zu is %d, must be %.0f", i, wanted.values.size(), whole,
           wanted.values[i]);
  }
}
// Words as the kernels have them: 16-bit integers are codes of V or of P.
float any_word(Word type) {
  const auto code = [] { return uint32_t(below(2) ? below(256) : below(256) - 128); };
  switch (type) {
    case Word::f32:
      return usual_number();
    case Word::bf16:
      return word_of(nearest_bf16(usual_number()), nearest_bf16(usual_number()));
    case Word::i16:
      return word_of(code(), code());
    default:
      return from_bits(below(8) ? uint32_t(random_bits()) : below(2) ? 0x80808080 : 0x7fffff80);
  }
}
void check_product(const char* name, Multiply multiply, Word a_type, Word b_type, bool in_place) {
  if (!multiply) return;
  const std::vector<size_t> odd = {1, 2, 3, 5, 16, 17, 31, 33}, whole = {16, 32, 64, 128};
  for (size_t steps : in_place ? whole : odd)
    for (size_t m : in_place ? std::vector<size_t>{16, 64} : std::vector<size_t>{1, 7, 16, 33, 64})
      for (bool add : {false, true}) {
        const size_t pitch = in_place ? steps : steps + 3, rows = (m + 15) / 16 * 16;
        const auto a_word = [&] { return any_word(a_type); };
        const auto b_word = [&] { return any_word(b_type); };
        const auto c_word = [&] {
          return is_integer(a_type) ? from_bits(uint32_t(below(2000) - 1000)) : usual_number();
        };
        const Floats a = numbers((m - 1) * pitch + steps, a_word);
        const Floats b = numbers(steps * kLanes, b_word);
        Floats c = numbers(rows * kLanes, c_word);
        const Sums wanted = product_of(a_type, b_type, reinterpret_cast<const char*>(a.data()),
                                       4 * pitch, m, b.data(), steps, add ? c.data() : nullptr);
        multiply(a.data(), int64_t(pitch), int64_t(m), b.data(), int(steps), c.data(), add);
        expect_sums(name, is_integer(a_type), c.data(), wanted);
      }
}
void check_products(const Operations& o) {
  check_product("the product of fp32", o.f32, Word::f32, Word::f32, false);
  check_product("the product of bf16", o.bf16, Word::bf16, Word::bf16, false);
  check_product("the product of 16-bit integers", o.i16, Word::i16, Word::i16, false);
  check_product("the product of bytes", o.u8i8, Word::i8, Word::u8, false);
  check_product("the product of fp32 rows", o.f32_rows, Word::f32, Word::f32, true);
  check_product("the product of 16-bit rows", o.i16_rows, Word::i16, Word::i16, true);
}

void check_tile_scores(const char* name, TileScores scores, Word type) {
  for (size_t steps : {16, 32, 48, 64})
    for (size_t pitch : {steps, steps + 5}) {
      const auto word = [&] { return any_word(type); };
      const Floats key = numbers((kBlockK - 1) * pitch + steps, word);
      const Floats q = numbers(2 * steps * kLanes, word);
      Floats c(2 * kBlockK * kLanes, NAN);
      const char* rows = reinterpret_cast<const char*>(key.data());
      scores(rows, int64_t(4 * pitch), q.data(), int(steps), c.data());
      for (size_t g = 0; g < 2; ++g)
        expect_sums(name, is_integer(type), &c[g * kBlockK * kLanes],
                    product_of(type, type, rows, 4 * pitch, kBlockK, &q[g * steps * kLanes], steps,
                               nullptr));
    }
}
void check_tiles(const Operations& o) {
  if (!o.tile_i8) return;
  check_tile_scores("tile_scores of int8", o.tile_i8, Word::i8);
  check_tile_scores("tile_scores of bf16", o.tile_bf16, Word::bf16);
  const size_t kChannels = 32, kPairs = kBlockK / 2, kQuads = kBlockK / 4;
  // V of two blocks, P of two blocks and two groups, sums of two groups.
  const Floats v = numbers(2 * kChannels * kPairs, [] { return any_word(Word::bf16); });
  const Floats p = numbers(4 * kPairs * kLanes, [] { return any_word(Word::bf16); });
  const Floats before = numbers(2 * kChannels * kLanes, usual_number);
  Floats c = before;
  o.tile_accumulate(reinterpret_cast<const char*>(v.data()), p.data(), c.data());
  for (size_t g = 0; g < 2; ++g) {
    Sums both =
        product_of(Word::bf16, Word::bf16, reinterpret_cast<const char*>(v.data()), 4 * kPairs,
                   kChannels, &p[g * kPairs * kLanes], kPairs, &before[g * kChannels * kLanes]);
    const Sums second =
        product_of(Word::bf16, Word::bf16, reinterpret_cast<const char*>(&v[kChannels * kPairs]),
                   4 * kPairs, kChannels, &p[(2 + g) * kPairs * kLanes], kPairs, nullptr);
    for (size_t i = 0; i < both.values.size(); ++i)
      both.values[i] += second.values[i], both.sizes[i] += second.sizes[i];
    both.terms += second.terms;
    expect_sums("tile_accumulate", false, &c[g * kChannels * kLanes], both);
  }
  const Floats codes = numbers(kChannels * kQuads, [] { return any_word(Word::i8); });
  const Floats probabilities = numbers(2 * kQuads * kLanes, [] { return any_word(Word::u8); });
  Floats sums(2 * kChannels * kLanes, NAN);
  const char* rows = reinterpret_cast<const char*>(codes.data());
  o.tile_bytes(rows, probabilities.data(), sums.data());
  for (size_t g = 0; g < 2; ++g)
    expect_sums("tile_bytes", true, &sums[g * kChannels * kLanes],
                product_of(Word::i8, Word::u8, rows, 4 * kQuads, kChannels,
                           &probabilities[g * kQuads * kLanes], kQuads, nullptr));
}

// --- rows ---------------------------------------------------------------------------------------

void check_rows(const Operations& o) {
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::i8})
    for (size_t n = 1; n < 50; ++n)
      for (size_t stride : {1, 3}) {
        const size_t size = dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2;
        const auto plain = [&](const char* p) {
          uint16_t half = 0;
          float x = 0;
          std::memcpy(size == 4 ? static_cast<void*>(&x) : &half, p, size);
          return dtype == Dtype::f32    ? x
                 : dtype == Dtype::bf16 ? bf16_number(half)
                 : dtype == Dtype::f16  ? f16_number(half)
                                        : float(int8_t(*p));
        };
        std::vector<char> row(((n - 1) * stride + 1) * size);
        for (char& x : row) x = char(random_bits());
        Rows x;
        x.data = row.data();
        x.stride_d = int64_t(stride * size);
        x.dtype = dtype;
        Floats out((n + 15) / 16 * 16, -7.0f);
        o.read_row(x, int64_t(n), out.data());
        for (size_t i = 0; i < out.size(); ++i)
          expect_same("read_row", double(n), double(i), out[i],
                      i < n ? plain(&row[i * stride * size]) : 0.0f);
        if (dtype == Dtype::i8 || stride > 1) continue;
        const Floats numbers_out = numbers(out.size(), any_number);
        o.write_row(row.data(), dtype, int64_t(n), numbers_out.data());
        for (size_t i = 0; i < n; ++i) {
          const float number = numbers_out[i];
          expect_same("write_row", double(n), double(i), plain(&row[i * size]),
                      dtype == Dtype::f32    ? number
                      : dtype == Dtype::bf16 ? bf16_number(nearest_bf16(number))
                                             : f16_number(nearest_f16(number)));
        }
      }
}

void check(const char* name, const Operations* operations, uint32_t needs) {
  if (!operations) return std::printf("%s: skipped, it is for another processor\n", name), void();
  if (needs & ~features())
    return std::printf("%s: skipped, this machine does not have it\n", name), void();
  tested = name;
  shown = 0;
  const int before = failures;
  for (auto checks : {check_arithmetic, check_lanes, check_exp2, check_conversions, check_codes,
                      check_layouts, check_products, check_tiles, check_rows})
    checks(*operations);
  std::printf("%s: %s\n", name, failures == before ? "all operations are right" : "FAILED");
}

}  // namespace
}  // namespace sparge

#define SPARGE_CHECK(processor, name, needs, for_tests, description) \
  sparge::check(#name, SPARGE_ON_##processor(sparge::operations_##name), needs);

int main() {
  using namespace sparge;
  SPARGE_ISAS(SPARGE_CHECK)
  if (!failures) std::printf("operations: all tests passed\n");
  return failures ? 1 : 0;
}
