// torch.ops.sparge_cpu.packed_{predict, select}: the ops of ops_plan.cpp for packed sequences.
//
// `q_rows` and `k_rows` [n, 2] have the first row and the number of rows of each sequence,
// `offsets` [n] the key position of its first query. Mass and lists have the shape [pairs of
// blocks, Hq], in the order of the pack (pack.h).
#include <torch/csrc/stable/library.h>

#include "pack.h"

namespace sparge {
namespace {

// Pieces of heads, those that may attend the most keys first.
std::vector<Piece> plan_pieces(const Kernels& k, const Pack& pack, int64_t Hq) {
  auto per_head = [&](int64_t i) { return blocks_of(pack.n_q(i), k.query_blocks_per_task); };
  std::vector<Piece> pieces = pieces_of(pack.n(), [&](int64_t i) { return Hq * per_head(i); });
  for (Piece& piece : pieces) {
    const int64_t i = piece.sequence, rows = k.query_blocks_per_task * kBlockQ;
    const int64_t end = std::min((piece.task % per_head(i) + 1) * rows, pack.q.length(i));
    const int64_t keys = pack.k.length(i), seen = end + pack.offsets[i];
    piece.cost = pack.is_causal ? std::max<int64_t>(0, std::min(seen, keys)) : keys;
  }
  costly_first(&pieces, pack.n());
  return pieces;
}

void packed_predict(const Tensor& query, const Tensor& key, MaybeTensor q_scale,
                    MaybeTensor k_scale, int64_t precision, double softmax_scale,
                    MaybeTensor q_pooled, MaybeTensor k_pooled, MaybeTensor k_similarity,
                    MaybeTensor min_similarity, const Tensor& q_rows, const Tensor& k_rows,
                    const Tensor& offsets, bool is_causal, int64_t predictor, int64_t sample_rows,
                    Tensor mass, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Pack pack(&arguments, q_rows, k_rows, offsets, is_causal);
  PredictArgs a{};
  a.predictor = Predictor(in_range("predictor", predictor, 0, int64_t(Predictor::blend)));
  const PackedScores scored =
      PackedScores::read(&arguments, pack, query, key, q_scale, k_scale, precision, softmax_scale,
                         a.predictor != Predictor::mean);
  const int64_t Hq = scored.query.H, Hk = scored.key.H, D = scored.query.D;
  a.sample_rows = int(in_range("sample_rows", sample_rows, 1, kBlockQ));
  a.q_pooled = arguments.read<float>("q_pooled", q_pooled, {pack.q_blocks.back(), Hq, D});
  a.k_pooled = arguments.read<float>("k_pooled", k_pooled, {pack.k_blocks.back(), Hk, D});
  if (a.predictor != Predictor::rows && !(a.q_pooled && a.k_pooled))
    refuse("q_pooled and k_pooled are needed by predictor ", predictor);
  a.similarity.minimum = arguments.read<float>("min_similarity", min_similarity, {Hq});
  a.similarity.key =
      arguments.read<float>("k_similarity", k_similarity, {pack.k_blocks.back(), Hk});
  if (a.similarity.minimum && !a.similarity.key)
    refuse("k_similarity is needed with min_similarity");
  a.mass = arguments.write<float>("mass", mass, {pack.pairs.back(), Hq});
  std::vector<PredictArgs> each(size_t(pack.n()), a);
  size_t scratch = 0;
  for (int64_t i = 0; i < pack.n(); ++i) {
    PredictArgs& own = each[size_t(i)];
    scored.fill(&own, pack, i);
    own.q_pooled = part_of(a.q_pooled, pack.q_blocks, i, Hq * D);
    own.k_pooled = part_of(a.k_pooled, pack.k_blocks, i, Hk * D);
    own.similarity.key = part_of(a.similarity.key, pack.k_blocks, i, Hk);
    own.mass = part_of(a.mass, pack.pairs, i, Hq);
    scratch = std::max(scratch, k.predict_scratch(own));
  }
  run_pack(k, plan_pieces(k, pack, Hq), scratch, [&](int64_t i, int64_t task, char* buffer) {
    k.predict(each[size_t(i)], task, buffer);
  });
}

// Blocks that are kept whatever is predicted, as rules/forced_blocks.py says.
struct Forced {
  int64_t sink_blocks, window;
  const int64_t* protect;  // [n_protected][2] token ranges, sliced like Python
  int64_t n_protected;

  void write(const Pack& pack, int64_t i, bool* out) const {
    const int64_t Lq = pack.q.length(i), Lk = pack.k.length(i), offset = pack.offsets[i];
    const int64_t n_q = pack.n_q(i), n_k = pack.n_k(i);
    for (int64_t i_q = 0; i_q < n_q; ++i_q) {
      bool* row = out + i_q * n_k;
      std::fill(row, row + n_k, false);
      std::fill(row, row + std::min(sink_blocks, n_k), true);
      // The block's own positions, and `window` key blocks more to each side.
      const int64_t first = i_q * kBlockQ + offset;
      const int64_t last = std::min((i_q + 1) * kBlockQ, Lq) - 1 + offset;
      if (!(pack.is_causal || window) || last < 0 || first >= Lk) continue;
      const int64_t low = std::max<int64_t>(first, 0) / kBlockK - window;
      const int64_t high = std::min(last, Lk - 1) / kBlockK + window;
      std::fill(row + std::max<int64_t>(low, 0), row + std::min(high + 1, n_k), true);
    }
    for (int64_t p = 0; p < n_protected; ++p) {
      const int64_t start = place(protect[2 * p], Lk), stop = place(protect[2 * p + 1], Lk);
      const int64_t last_row = std::min(stop - offset, Lq);
      const int64_t first_row = std::max<int64_t>(start - offset, 0);
      for (int64_t i_q = 0; start < stop && i_q < n_q; ++i_q) {
        bool* row = out + i_q * n_k;
        std::fill(row + start / kBlockK, row + blocks_of(stop, kBlockK), true);
        if (first_row < last_row && i_q >= first_row / kBlockQ && i_q * kBlockQ < last_row)
          std::fill(row, row + n_k, true);
      }
    }
  }
  static int64_t place(int64_t x, int64_t L) {
    return x < 0 ? std::max<int64_t>(x + L, 0) : std::min(x, L);
  }
};

void packed_select(MaybeTensor mass, int64_t keep, const Tensor& amount, MaybeTensor q_similarity,
                   MaybeTensor k_similarity, MaybeTensor min_similarity, const Tensor& q_rows,
                   const Tensor& k_rows, const Tensor& offsets, bool is_causal, int64_t sink_blocks,
                   int64_t window, MaybeTensor protect, Tensor counts, Tensor indices,
                   Tensor allowed, int64_t isa) {
  const Kernels& k = kernels_of(isa);
  Arguments arguments;
  const Pack pack(&arguments, q_rows, k_rows, offsets, is_causal);
  SelectArgs a{};
  a.indices = arguments.write<int32_t>("indices", indices, {pack.pairs.back(), kAny});
  const int64_t Hq = indices.size(1), n_q = pack.q_blocks.back();
  a.similarity.key =
      arguments.read<float>("k_similarity", k_similarity, {pack.k_blocks.back(), kAny});
  const int64_t Hk = k_similarity ? k_similarity->size(1) : Hq;
  if (Hq % Hk) refuse("k_similarity must have a number of heads that divides ", Hq, ", got ", Hk);
  a.keep = Keep(in_range("keep", keep, 0, int64_t(Keep::fraction)));
  a.mass = arguments.read<float>("mass", mass, {pack.pairs.back(), Hq});
  if (a.keep != Keep::all && !a.mass) refuse("mass is needed by keep ", keep);
  a.amount = arguments.read<double>("amount", amount, {Hq});
  check_between("amount", a.amount, Hq, 0.0, 1.0);
  a.similarity.query = arguments.read<float>("q_similarity", q_similarity, {n_q, Hq});
  a.similarity.minimum = arguments.read<float>("min_similarity", min_similarity, {Hq});
  if (a.similarity.minimum && !(a.similarity.query && a.similarity.key))
    refuse("q_similarity and k_similarity are needed with min_similarity");
  Forced forced{in_range("sink_blocks", sink_blocks, 0, kMaxLength),
                in_range("window", window, 0, kMaxLength), nullptr, 0};
  if (protect) {
    forced.protect = arguments.read<int64_t>("protect", *protect, {kAny, 2});
    forced.n_protected = protect->size(0);
    for (int64_t i = 0; i < 2 * forced.n_protected; ++i)
      in_range("protect", forced.protect[i], -kMaxOffset, kMaxOffset);
  }
  a.counts = arguments.write<int32_t>("counts", counts, {n_q, Hq});
  a.allowed = arguments.write<int32_t>("allowed", allowed, {n_q, Hq});
  const std::unique_ptr<bool[]> keeps(new bool[size_t(pack.pairs.back())]);
  run_tasks(k, pack.n(), 64, nullptr,
            [&](int64_t i, char*) { forced.write(pack, i, keeps.get() + pack.pairs[size_t(i)]); });
  std::vector<SelectArgs> each(size_t(pack.n()), a);
  size_t scratch = 0;
  for (int64_t i = 0; i < pack.n(); ++i) {
    SelectArgs& own = each[size_t(i)];
    own.shape = pack.shape(i, Hq, Hk, 1, 1);
    own.tokens = pack.tokens(i);
    own.mass = part_of(a.mass, pack.pairs, i, Hq);
    own.similarity.query = part_of(a.similarity.query, pack.q_blocks, i, Hq);
    own.similarity.key = part_of(a.similarity.key, pack.k_blocks, i, Hk);
    own.forced = keeps.get() + pack.pairs[size_t(i)];
    own.counts = part_of(a.counts, pack.q_blocks, i, Hq);
    own.indices = part_of(a.indices, pack.pairs, i, Hq);
    own.allowed = part_of(a.allowed, pack.q_blocks, i, Hq);
    scratch = std::max(scratch, k.select_scratch(own));
  }
  run_pack(k, plan_pieces(k, pack, Hq), scratch,
           [&](int64_t i, int64_t task, char* buffer) { k.select(each[size_t(i)], task, buffer); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sparge_cpu, m) {
  m.def(
      "packed_predict(Tensor query, Tensor key, Tensor? q_scale, Tensor? k_scale, int precision, "
      "float softmax_scale, Tensor? q_pooled, Tensor? k_pooled, Tensor? k_similarity, "
      "Tensor? min_similarity, Tensor q_rows, Tensor k_rows, Tensor offsets, bool is_causal, "
      "int predictor, int sample_rows, Tensor(a!) mass, int isa) -> ()");
  m.def(
      "packed_select(Tensor? mass, int keep, Tensor amount, Tensor? q_similarity, "
      "Tensor? k_similarity, Tensor? min_similarity, Tensor q_rows, Tensor k_rows, "
      "Tensor offsets, bool is_causal, int sink_blocks, int window, Tensor? protect, "
      "Tensor(a!) counts, Tensor(b!) indices, Tensor(c!) allowed, int isa) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sparge_cpu, CPU, m) {
  m.impl("packed_predict", TORCH_BOX(&packed_predict));
  m.impl("packed_select", TORCH_BOX(&packed_select));
}

}  // namespace sparge
