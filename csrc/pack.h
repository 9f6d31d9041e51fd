// Packed sequences of different lengths: where each lies in the caller's tensors, [1, H, T, D] of
// any strides, and its part of the lists of a plan. Lists concatenate the sequences; each slice has
// the layout of a separate call.
#pragma once

#include <vector>

#include "tensors.h"

namespace sparge {

constexpr int64_t kMaxSequences = int64_t(1) << 24;

// Sums before each of n numbers, and of all of them.
template <class F>
std::vector<int64_t> sums_before(int64_t n, const char* name, const F& number) {
  std::vector<int64_t> before(size_t(n + 1));
  for (int64_t i = 0; i < n; ++i) {
    before[size_t(i + 1)] = before[size_t(i)] + number(i);
    if (before[size_t(i + 1)] > kMaxNumbers) refuse(name, " of all sequences are too many");
  }
  return before;
}

// Where the rows of each sequence are: in the caller's tensor, and in the order of the pack.
struct Sequences {
  const char* name = "";
  int64_t n = 0;
  const int64_t* table = nullptr;  // [n][2] first row, number of rows
  std::vector<int64_t> before;     // [n + 1] rows before each in the order of the pack

  Sequences(Arguments* arguments, const char* name, const Tensor& rows) : name(name) {
    table = arguments->read<int64_t>(name, rows, {kAny, 2});
    n = in_range("the number of sequences", rows.size(0), 1, kMaxSequences);
    for (int64_t i = 0; i < n; ++i) {
      if (start(i) < 0 || start(i) > kMaxLength || length(i) < 1 || length(i) > kMaxLength)
        refuse(name, " must have a first row and at least one row for each sequence; sequence ", i,
               " has ", start(i), " and ", length(i));
    }
    before = sums_before(n, "rows", [&](int64_t i) { return length(i); });
  }
  int64_t start(int64_t i) const { return table[2 * i]; }
  int64_t length(int64_t i) const { return table[2 * i + 1]; }
  int64_t total() const { return before.back(); }
  std::vector<int64_t> blocks_before(int64_t block) const {
    return sums_before(n, "blocks", [&](int64_t i) { return blocks_of(length(i), block); });
  }
  // The sequences end within the T rows of a tensor.
  void check_within(const char* tensor, int64_t T) const {
    for (int64_t i = 0; i < n; ++i)
      if (start(i) + length(i) > T)
        refuse(name, " must end within the ", T, " rows of ", tensor, "; sequence ", i,
               " has rows ", start(i), " … ", start(i) + length(i) - 1);
  }
  // Each begins behind the one before: their outputs share no row.
  void check_apart() const {
    for (int64_t i = 1; i < n; ++i)
      if (start(i) < start(i - 1) + length(i - 1))
        refuse(name, " must be ascending and share no row; sequence ", i, " begins at ", start(i),
               ", the one before ends at ", start(i - 1) + length(i - 1));
  }
};

// Queries and keys of each sequence, and its diagonal.
struct Pack {
  Sequences q, k;
  const int64_t* offsets;
  bool is_causal;
  // [n + 1] before each sequence: query blocks, key blocks, pairs of them.
  std::vector<int64_t> q_blocks, k_blocks, pairs;

  Pack(Arguments* arguments, const Tensor& q_rows, const Tensor& k_rows, const Tensor& offsets,
       bool is_causal)
      : q(arguments, "q_rows", q_rows),
        k(arguments, "k_rows", k_rows),
        offsets(arguments->read<int64_t>("offsets", offsets, {q.n})),
        is_causal(is_causal) {
    if (k.n != q.n) refuse("k_rows must have the ", q.n, " sequences of q_rows, got ", k.n);
    for (int64_t i = 0; i < q.n; ++i) tokens(i);  // checks the offset
    q_blocks = q.blocks_before(kBlockQ);
    k_blocks = k.blocks_before(kBlockK);
    pairs = sums_before(q.n, "pairs of blocks", [&](int64_t i) { return n_q(i) * n_k(i); });
  }
  int64_t n() const { return q.n; }
  int64_t n_q(int64_t i) const { return q_blocks[size_t(i + 1)] - q_blocks[size_t(i)]; }
  int64_t n_k(int64_t i) const { return k_blocks[size_t(i + 1)] - k_blocks[size_t(i)]; }
  Shape shape(int64_t i, int64_t Hq, int64_t Hk, int64_t D, int64_t Dv) const {
    return {1, Hq, Hk, q.length(i), k.length(i), D, Dv};
  }
  TokenMask tokens(int64_t i) const { return Arguments::diagonal(is_causal, offsets[i]); }
};

// Where the part of sequence i begins in a tensor in the order of the pack; null without one.
template <class T>
T* part_of(T* data, const std::vector<int64_t>& before, int64_t i, int64_t per_row) {
  return data ? data + before[size_t(i)] * per_row : nullptr;
}

}  // namespace sparge
