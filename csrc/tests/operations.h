// The vocabulary of an instruction set (arch/*.h) and what is built directly on it, as functions
// over memory: a program can then hold those of several. Null where a set has no such operation.
#pragma once

#include "../args.h"

namespace sparge {

using Unary = void (*)(const float* a, float* out);  // 16 numbers each
using Binary = void (*)(const float* a, const float* b, float* out);
using Compare = uint32_t (*)(const float* a, const float* b);
using Reduce = float (*)(const float* a);
using Widen = void (*)(const void* in, float* out);
using Narrow = void (*)(const float* in, void* out);
// A is [m][steps] words, `pitch` words from row to row; B [steps][16], C [m rounded up to 16][16].
using Multiply = void (*)(const float* a, int64_t pitch, int64_t m, const float* b, int steps,
                          float* c, bool add);
// Scores of 64 keys, rows of `pitch` bytes: two groups of [steps][16] words, two of [64][16].
using TileScores = void (*)(const char* key, int64_t pitch, const float* q, int steps, float* c);

struct Operations {
  Binary add, subtract, multiply, divide, max, min;
  Unary abs, round, sqrt;
  void (*fma)(const float* a, const float* b, const float* c, float* out);
  Compare less, at_least;
  void (*select)(uint32_t lanes, const float* yes, const float* no, float* out);
  Reduce lane_max, lane_sum;
  Unary swap_1, swap_2, swap_4, swap_8;
  void (*broadcast)(float x, float* out);
  void (*zeros)(float* zero, int32_t* izero);
  void (*to_float)(const int32_t* a, float* out);
  void (*as_words)(const float* a, int32_t* out);
  // f of split; then raise of p, which `split` gave the whole part of.
  Unary split;
  Binary raise;
  Unary exp2_4, exp2_6, exp2_codes;  // the last times 255, and not exactly 0 below 2^-126
  Widen load_bf16, load_f16, load_i8;
  Narrow store_bf16, store_f16, store_i8;
  void (*widen_i8)(const int8_t* in, void* out);
  Binary pair_bf16, pair_i16;  // of low and high halves; `out` are words
  void (*pair_codes)(const int8_t* low, const int8_t* high, float* out);
  void (*quad_u8)(const float* abcd, float* out);  // four times 16 numbers
  void (*transpose)(const float* in, int64_t in_row, float* out, int64_t out_row);
  int rows_at_once;
  void (*store_panels)(float* out, int64_t pitch, const int32_t* words);
  int32_t (*sum_i8)(const int8_t* codes);  // of 64
  Multiply f32, bf16, i16, u8i8;           // product.h: panels, then steps of mad_*
  Multiply f32_rows, i16_rows;             // rows without gaps, read in place
  TileScores tile_i8, tile_bf16;
  // Sums of 32 channels by 32 queries over 64 keys: V by channel, P of two groups, C of two groups.
  void (*tile_accumulate)(const char* v, const float* p, float* c);
  void (*tile_bytes)(const char* v, const float* p, float* sums);
  // read_rows.h
  void (*read_row)(const Rows& x, int64_t n, float* out);
  void (*write_row)(char* out, Dtype dtype, int64_t n, const float* x);
  Unary half_of;
};

}  // namespace sparge
