// Packed sequences of different lengths: where each lies in the caller's tensors, [1, H, T, D] of
// any strides, and its part of the lists of a plan. Lists concatenate the sequences; each slice has
// the layout of a separate call.
#pragma once

#include <vector>

#include "tensors.h"

namespace sparge {

struct Sequence {
  int64_t q_start, Lq, k_start, Lk, offset;
  int64_t q_blocks, pairs;  // of the sequences before it: query blocks, pairs with key blocks
};

// `q_rows` and `k_rows` [n, 2]: first row and number of rows of each sequence, of the T_q and T_k
// rows of the tensors; `offsets` [n]. Queries of two sequences share no row.
inline std::vector<Sequence> read_pack(Arguments* arguments, const Tensor& q_rows,
                                       const Tensor& k_rows, const Tensor& offsets, int64_t T_q,
                                       int64_t T_k) {
  constexpr int64_t kMaxSequences = int64_t(1) << 24;
  const int64_t* q = arguments->read<int64_t>("q_rows", q_rows, {kAny, 2});
  const int64_t n = in_range("the number of sequences", q_rows.size(0), 1, kMaxSequences);
  const int64_t* k = arguments->read<int64_t>("k_rows", k_rows, {kAny, 2});
  if (k_rows.size(0) != n)
    refuse("k_rows must have the ", n, " sequences of q_rows, got ", k_rows.size(0));
  const int64_t* offset = arguments->read<int64_t>("offsets", offsets, {n});
  auto check = [](const char* name, const char* tensor, int64_t i, const int64_t* row, int64_t T) {
    if (row[0] < 0 || row[0] > kMaxLength || row[1] < 1 || row[1] > kMaxLength)
      refuse(name, " must have a first row and at least one row for each sequence; sequence ", i,
             " has ", row[0], " and ", row[1]);
    if (row[0] + row[1] > T)
      refuse(name, " must end within the ", T, " rows of ", tensor, "; sequence ", i, " has rows ",
             row[0], " … ", row[0] + row[1] - 1);
  };
  std::vector<Sequence> pack;
  Sequence s{};
  for (int64_t i = 0; i < n; ++i, q += 2, k += 2) {
    check("q_rows", "query", i, q, T_q);
    check("k_rows", "key", i, k, T_k);
    if (i && q[0] < s.q_start + s.Lq)
      refuse("q_rows must be ascending and share no row; sequence ", i, " begins at ", q[0],
             ", the one before ends at ", s.q_start + s.Lq);
    s.q_blocks += blocks_of(s.Lq, kBlockQ);
    s.pairs += blocks_of(s.Lq, kBlockQ) * blocks_of(s.Lk, kBlockK);
    if (s.pairs > kMaxNumbers) refuse("pairs of blocks of all sequences are too many");
    s.q_start = q[0], s.Lq = q[1], s.k_start = k[0], s.Lk = k[1];
    s.offset = Arguments::diagonal(true, offset[i]).offset;
    pack.push_back(s);
  }
  return pack;
}

}  // namespace sparge
