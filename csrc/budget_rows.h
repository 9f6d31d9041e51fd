// The rows that an error budget looks at, of one head: plain code, twins of `choose_rows` and
// `draw_measured` in rules/error_budget.py, where the rules are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "work.h"

namespace sparge {

// A mixed 32-bit integer: no lattice.
inline uint32_t hash_of(uint64_t number) {
  uint32_t x = uint32_t(number ^ 61 ^ (number >> 16)) * 0x9E3779B1u;
  x = (x ^ (x >> 15)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Surveyed rows of a query block, and the most of one.
struct RowCounts {
  int64_t rows = 0, most = 0;
  double disagrees = 0.0;

  RowCounts() = default;
  RowCounts(const BudgetSteps& steps, const BudgetRules& rules, int64_t n_q)
      : disagrees(rules.disagrees) {
    const int64_t* row = steps.rows_by_blocks;
    for (int64_t i = 0; i + 1 < steps.n_rows && n_q > row[0]; ++i) row += 3;
    rows = row[1], most = row[2];
  }
  int64_t slots_far() const { return most / 4; }
};

// What follows from the length alone, of one checked query block.
struct CheckedBlock {
  int64_t start;                 // its first row
  bool may[kBlockQ] = {};        // places that may be checked: those that prediction has not seen
  int64_t n_far, n_near;         // how many of them are far ones, and how many are not
  int64_t far_ranks[kBlockQ];    // [most / 4] pseudo-random
  int64_t near_places[kBlockQ];  // those that may be checked, in pseudo-random order
};

inline std::vector<CheckedBlock> checked_blocks(int64_t Lq, int64_t sample_rows,
                                                const BudgetRules& rules, const RowCounts& counts) {
  const int64_t n_q = (Lq + kBlockQ - 1) / kBlockQ, most_far = counts.slots_far();
  const int64_t apart = std::max<int64_t>(1, n_q / int64_t(rules.many_blocks));
  std::vector<CheckedBlock> blocks;
  for (int64_t first = 0; first + apart <= n_q; first += apart) {
    const int64_t i_q = std::min(first + int64_t(hash_of(uint64_t(first)) % apart), n_q - 1);
    CheckedBlock block;
    block.start = i_q * kBlockQ;
    const int64_t valid = std::min<int64_t>(kBlockQ, Lq - block.start);
    const int64_t sampled = std::min(sample_rows, valid);
    std::fill(block.may, block.may + valid, true);
    for (int64_t t = 0; t < sampled; ++t) block.may[(t + 1) * valid / sampled - 1] = false;
    if (sampled == valid) std::fill(block.may, block.may + valid, true);
    std::pair<uint32_t, int64_t> order[kBlockQ];
    int64_t open = 0;
    for (int64_t p = 0; p < valid; ++p)
      if (block.may[p]) order[open++] = {hash_of(uint64_t(block.start + 1 + p)), p};
    std::sort(order, order + open);
    for (int64_t i = 0; i < open; ++i) block.near_places[i] = order[i].second;
    block.n_far = std::max<int64_t>(1, open / int64_t(rules.far_share));
    block.n_near = open - block.n_far;
    const int64_t rank = hash_of(uint64_t(i_q) ^ 0x5BD1E995u);
    const int64_t step = std::max<int64_t>(1, block.n_far / most_far);
    for (int64_t j = 0; j < most_far; ++j) block.far_ranks[j] = (rank + j * step) % block.n_far;
    blocks.push_back(block);
  }
  return blocks;
}

// The farthest places of one block that may be checked, those of larger index last among equals.
inline void farthest(const float* deviation, const bool* may, int64_t valid, int64_t n_far,
                     int64_t* far) {
  float distance[kBlockQ];
  int64_t held = 0;
  for (int64_t p = 0; p < valid; ++p) {
    if (!may[p]) continue;
    // What is not finite is farthest of all.
    const float x = deviation[p] < INFINITY ? deviation[p] : INFINITY;
    if (held == n_far && !(x > distance[held - 1])) continue;
    int64_t at = held < n_far ? held++ : held - 1;
    for (; at > 0 && x > distance[at - 1]; --at)
      distance[at] = distance[at - 1], far[at] = far[at - 1];
    distance[at] = x, far[at] = p;
  }
}

// Weights of the places of one block, 0 where a place is not used: `n` rows, the far ones first.
inline void weigh_places(int64_t n, int64_t n_far, int64_t n_near, const RowCounts& counts,
                         double* weights) {
  const int64_t most_far = counts.slots_far();
  const int64_t far = std::min(std::max<int64_t>(n / 4, 1), n_far),
                near = std::min(n - far, n_near);
  for (int64_t i = 0; i < counts.most; ++i) {
    const bool is_far = i < most_far;
    const int64_t slot = is_far ? i : i - most_far, used = is_far ? far : near;
    weights[i] = slot < used ? double(is_far ? n_far : n_near) / double(used) : 0.0;
  }
}

// rows [n · most], -1 where unused; weights [2][n · most]: of the rows that every budget has, and
// of all rows.
inline void choose_rows(const float* deviation, const float* energy, int64_t L, bool small,
                        const std::vector<CheckedBlock>& blocks, const RowCounts& counts,
                        int64_t* rows, double* base_weights, double* weights) {
  const int64_t most = counts.most, most_far = counts.slots_far(), n = int64_t(blocks.size());
  for (int64_t i = 0; i < n; ++i) {
    const CheckedBlock& block = blocks[size_t(i)];
    const int64_t start = block.start, valid = std::min<int64_t>(kBlockQ, L - start);
    int64_t far[kBlockQ];
    farthest(deviation + start, block.may, valid, block.n_far, far);
    double spread = 0.0;
    for (int64_t r = 0; r < valid; ++r)
      if (block.may[r])
        spread += deviation[start + r] < INFINITY ? double(deviation[start + r]) : INFINITY;
    const bool agrees = spread <= counts.disagrees * double(energy[start / kBlockQ]);
    const int64_t base = agrees ? counts.rows : std::min(2 * counts.rows, most);
    const int64_t every = small ? std::min(2 * base, most) : base;
    double *own_base = base_weights + i * most, *own = weights + i * most;
    weigh_places(base, block.n_far, block.n_near, counts, own_base);
    weigh_places(every, block.n_far, block.n_near, counts, own);
    int64_t* out = rows + i * most;
    for (int64_t j = 0; j < most_far; ++j) out[j] = far[block.far_ranks[j]];
    const int64_t* next = block.near_places;
    for (int64_t j = most_far; j < most; ++j) {
      if (!(own_base[j] > 0.0 || own[j] > 0.0)) continue;
      while (std::find(far, far + block.n_far, *next) != far + block.n_far) ++next;
      out[j] = *next++;
    }
    for (int64_t j = 0; j < most; ++j)
      out[j] = own_base[j] > 0.0 || own[j] > 0.0 ? out[j] + start : -1;
  }
  for (double* each : {base_weights, weights}) {
    double whole = 0.0;
    for (int64_t i = 0; i < n * most; ++i) whole += each[i];
    for (int64_t i = 0; i < n * most; ++i) each[i] /= whole;
  }
}

// Surveyed rows [n], their weights, what they drop [n, n_steps] and its mean; `m` rows are drawn.
struct Surveyed {
  int64_t n, n_steps;
  const int64_t* rows;
  const double* weights;
  const float* dropped;
  const double* mean;
};

// Places by what they drop at a step, in strata of the same size, and by position within each.
// Places that only small budgets survey come last, whatever is known of them.
inline std::vector<int64_t> in_strata(const Surveyed& s, int64_t step, int64_t strata) {
  std::vector<int64_t> order(static_cast<size_t>(s.n)), stratum(static_cast<size_t>(s.n));
  for (int64_t i = 0; i < s.n; ++i) order[size_t(i)] = i;
  const auto drops = [&](int64_t i) {
    const float x = s.dropped[i * s.n_steps + step];
    return x == x && s.weights[i] > 0.0 ? x : INFINITY;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return drops(i) < drops(j); });
  const int64_t held = std::count_if(s.weights, s.weights + s.n, [](double w) { return w > 0.0; });
  for (int64_t rank = 0; rank < s.n; ++rank)
    stratum[size_t(order[size_t(rank)])] = rank * strata / std::max<int64_t>(held, 1);
  std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {
    return std::make_pair(stratum[size_t(i)], i) < std::make_pair(stratum[size_t(j)], j);
  });
  return order;
}

inline void draw_measured(const Surveyed& s, const BudgetRules& rules, const BudgetSteps& steps,
                          int64_t* rows, double* weights, float* dropped) {
  const int64_t m = int64_t(rules.measured_rows);
  int64_t at = 0;
  double closest = INFINITY;
  for (int64_t step = 0; step < s.n_steps; ++step) {
    const double off = std::fabs(s.mean[step] - rules.reference);
    if (off < closest) closest = off, at = step;
  }
  const double mean = s.mean[at], share = 0.5 * std::min(mean / rules.reference, 1.0);
  const std::vector<int64_t> order = in_strata(s, at, int64_t(rules.strata));
  std::vector<double> mixed(size_t(s.n)), chance(size_t(s.n));
  std::vector<int64_t> drawn;
  double sum = 0.0, shares = 0.0;
  for (size_t i = 0; i < size_t(s.n); ++i) {
    const double own = double(s.dropped[order[i] * s.n_steps + at]);
    const double x = mean > 0.0 ? 1.0 - share + share * own / mean : 1.0;
    mixed[size_t(order[i])] = x == x ? x : 1.0;
    chance[i] = sum += s.weights[order[i]] * mixed[size_t(order[i])];
  }
  for (int64_t j = 0; j < m; ++j) {
    const double wanted = (double(j) + rules.phase) / double(m) * sum;
    const auto found = std::lower_bound(chance.begin(), chance.end(), wanted);
    drawn.push_back(order[std::min(size_t(found - chance.begin()), size_t(s.n - 1))]);
  }
  std::sort(drawn.begin(), drawn.end());  // rows that are near each other share their key blocks
  for (int64_t j = 0; j < m; ++j) {
    const int64_t place = drawn[size_t(j)];
    rows[j] = s.rows[place];
    shares += weights[j] = 1.0 / mixed[size_t(place)];
    for (int64_t i = 0; i < steps.n_measured; ++i)
      dropped[j * steps.n_measured + i] = s.dropped[place * s.n_steps + steps.measured[i]];
  }
  for (int64_t j = 0; j < m; ++j) weights[j] /= shares;
}

}  // namespace sparge
