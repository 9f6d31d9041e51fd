// Packed sequences of different lengths, run as one set of tasks. Each sequence has arguments of
// its own, as if it were alone, so the kernels compute what they compute for it alone.
//
// The caller's tensors are [1, H, T, D] of any strides. Intermediate tensors
// concatenate the sequences; each slice has the layout of a separate call, [H, L, …]. Such a tensor
// is contiguous and has the shape [rows of all sequences, H, …].
#pragma once

#include <algorithm>
#include <vector>

#include "tasks.h"
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

// Rows of all sequences: a tensor of the caller's, or one in the order of the pack.
struct PackedRows {
  Rows all;
  bool in_order = false;
  int64_t H = 0, D = 0, bytes = 0;

  // `H` and `D`: needed sizes, or kAny.
  static PackedRows read(Arguments* arguments, const char* name, const Tensor& x, int64_t H,
                         int64_t D, const Sequences& sequences) {
    PackedRows rows;
    rows.in_order = x.dim() == 3;
    if (rows.in_order) {
      rows.all = arguments->contiguous_rows(name, x, {sequences.total(), H, D});
    } else {
      rows.all = arguments->rows(name, x, {1, H, kAny, D});
      sequences.check_within(name, x.size(2));
    }
    rows.H = x.size(1), rows.D = x.size(x.dim() - 1);
    rows.bytes = int64_t(x.element_size());
    return rows;
  }
  Rows of(const Sequences& sequences, int64_t i) const {
    Rows r = all;
    if (in_order) {
      r.data += sequences.before[size_t(i)] * H * D * bytes;
      r.stride_d = bytes, r.stride_l = D * bytes, r.stride_h = sequences.length(i) * r.stride_l;
    } else {
      r.data += sequences.start(i) * r.stride_l;
    }
    return r;
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

// One task of one sequence.
struct Piece {
  int64_t sequence, task, cost;
};

// `of(i)`: the number of tasks of sequence i.
template <class F>
std::vector<Piece> pieces_of(int64_t n, const F& of) {
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t task = 0, end = of(i); task < end; ++task) pieces.push_back({i, task, 0});
  return pieces;
}
// Sequences with much to do first, and in each the pieces of a high cost. Pieces of one sequence
// stay together, because they read the same keys.
inline void costly_first(std::vector<Piece>* pieces, int64_t n) {
  std::vector<int64_t> whole(size_t(n), 0);
  for (const Piece& x : *pieces) whole[size_t(x.sequence)] += x.cost;
  std::stable_sort(pieces->begin(), pieces->end(), [&](const Piece& x, const Piece& y) {
    if (x.sequence == y.sequence) return x.cost > y.cost;
    const int64_t of_x = whole[size_t(x.sequence)], of_y = whole[size_t(y.sequence)];
    return of_x != of_y ? of_x > of_y : x.sequence < y.sequence;
  });
}

// f(sequence, task, scratch) for every piece.
template <class F>
void run_pack(const Kernels& k, const std::vector<Piece>& pieces, size_t scratch, const F& f) {
  run_tasks(k, int64_t(pieces.size()), scratch, nullptr, [&](int64_t i, char* buffer) {
    f(pieces[size_t(i)].sequence, pieces[size_t(i)].task, buffer);
  });
}

// What scores are computed from, for each sequence.
struct PackedScores {
  PackedRows query, key;
  const float *q_scale = nullptr, *k_scale = nullptr;
  Precision precision = Precision::exact;
  double softmax_scale = 1.0;

  static PackedScores read(Arguments* arguments, const Pack& pack, const Tensor& query,
                           const Tensor& key, const MaybeTensor& q_scale,
                           const MaybeTensor& k_scale, int64_t precision, double softmax_scale,
                           bool needs_codes) {
    PackedScores x;
    x.query = PackedRows::read(arguments, "query", query, kAny, kAny, pack.q);
    x.key = PackedRows::read(arguments, "key", key, kAny, x.query.D, pack.k);
    if (x.query.H % x.key.H)
      refuse("query must have a multiple of the ", x.key.H, " heads of key, got ", x.query.H);
    if (x.query.all.dtype != x.key.all.dtype)
      refuse("key must have the dtype of query, got ", toString(key.scalar_type()), " and ",
             toString(query.scalar_type()));
    const bool codes = x.key.all.dtype == Dtype::i8;
    x.q_scale = arguments->row_scales("q_scale", q_scale, codes, {pack.q.total(), x.query.H});
    x.k_scale = arguments->row_scales("k_scale", k_scale, codes, {pack.k.total(), x.key.H});
    x.precision = Arguments::precision(precision, codes, needs_codes);
    x.softmax_scale = Arguments::finite("softmax_scale", softmax_scale);
    return x;
  }
  void fill(ScoreArgs* a, const Pack& pack, int64_t i, int64_t Dv = 1) const {
    a->shape = pack.shape(i, query.H, key.H, query.D, Dv);
    a->tokens = pack.tokens(i);
    a->precision = precision;
    a->softmax_scale = softmax_scale;
    a->query = query.of(pack.q, i);
    a->key = key.of(pack.k, i);
    a->q_scale = {part_of(q_scale, pack.q.before, i, query.H), pack.q.length(i), 1};
    a->k_scale = {part_of(k_scale, pack.k.before, i, key.H), pack.k.length(i), 1};
  }
};

}  // namespace sparge
