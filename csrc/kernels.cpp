// The kernels of one instruction set: compiled once for each, with its flags. SPARGE_ARCH is its
// header, SPARGE_KERNELS the name of its table.
//
// Nothing here may run when the library is loaded, on whatever machine that is: no object with a
// constructor at namespace scope. no_constructors.cmake checks it.
#include SPARGE_ARCH

#include <type_traits>

#include "attend.h"
#include "backward.h"
#include "kv_facts.h"
#include "predict.h"
#include "select.h"
#include "statistics.h"
#include "step_errors.h"
#include "survey.h"

namespace sparge {
namespace {

template <Product QK, Product PV, int kDegree>
using Schedule =
    std::conditional_t<is_tile(QK), Interleaved<QK, PV, kDegree>, InTurn<QK, PV, kDegree>>;

// The schedule of a call: which products compute its scores and its outputs.
template <class F>
inline auto with_walk(const AttendArgs& a, F f) {
  using Int8 = Schedule<kScoresInt8, kOutHalf, 4>;
  using Fast = Schedule<kScoresInt8, kOutFast, 4>;
  using Half = Schedule<kScoresHalf, kOutHalf, 4>;
  using Exact = Schedule<Product::f32, Product::f32, 6>;
  switch (a.precision) {
    case Precision::int8:
      return f(static_cast<Int8*>(nullptr));
    case Precision::int8_fast:
      return f(static_cast<Fast*>(nullptr));
    case Precision::half:
      return half_in_f32(a) ? f(static_cast<Exact*>(nullptr)) : f(static_cast<Half*>(nullptr));
    default:
      return f(static_cast<Exact*>(nullptr));
  }
}
template <class W>
struct Pointee;
template <class W>
struct Pointee<W*> {
  using type = W;
};

size_t attend_scratch(const AttendArgs& a) {
  return with_walk(
      a, [&](auto w) { return typename Pointee<decltype(w)>::type(a, 0, nullptr).scratch_bytes; });
}
void attend(const AttendArgs& a, int64_t task, char* scratch) {
  with_walk(a, [&](auto w) {
    typename Pointee<decltype(w)>::type attention(a, task, scratch);
    const int32_t* kept = a.indices + task * a.shape.n_k();
    const int n = a.counts[task];
    attention.begin();
    const int32_t* visited = kept;
    int n_visited = n;
    if (a.pooled) {
      visited = attention.visited;
      n_visited = visit_pooled(a, attention.b, attention.h, attention.i_q, kept, n, attention.pools,
                               attention.visited);
    }
    attention.walk(visited, n_visited);
    attention.finish(kept, n);
    return 0;
  });
}
// The scratch and the run of a task: `Work` is its struct, made from arguments, task and scratch.
template <class Work, class Args>
size_t scratch_of(const Args& a) {
  return Work(a, 0, nullptr).scratch_bytes;
}
template <class Work, class Args>
void run(const Args& a, int64_t task, char* scratch) {
  Work(a, task, scratch).run();
}

void enter() {
#ifdef SPARGE_TILES
  TILE_BEGIN();
#endif
}
void leave() {
#ifdef SPARGE_TILES
  TILE_END();
#endif
}

constexpr Kernels kTable = {enter,
                            leave,
                            sum_rows,
                            statistics,
                            channels,
                            kBlocksPerTask,
                            scratch_of<Predictions, PredictArgs>,
                            run<Predictions, PredictArgs>,
                            scratch_of<Selection, SelectArgs>,
                            run<Selection, SelectArgs>,
                            deviations,
                            scratch_of<DroppedMasses, SurveyArgs>,
                            run<DroppedMasses, SurveyArgs>,
                            scratch_of<StepErrors, BudgetArgs>,
                            run<StepErrors, BudgetArgs>,
                            needs_code_sums,
                            v_tile_bytes,
                            find_kv_facts,
                            transpose_value,
                            attend_scratch,
                            attend,
                            backward_scratch,
                            backward_query,
                            backward_key};

}  // namespace

extern const Kernels SPARGE_KERNELS = kTable;

}  // namespace sparge
