// The step that each head takes under an error budget: plain code, the twin of `decide` in
// rules/error_budget.py, which has the rules and their numbers.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "work.h"

namespace sparge {

// Of one head. Surveyed, for both kinds of weights: [n_steps] each. Measured rows: [m] …
struct HeadFacts {
  int64_t n_steps, n_measured, m;
  const double *mean[2], *deviation[2], *heaviest[2];
  const double *skipping, *total, *whole, *weights;
  const float* dropped;
};

// NaN stays NaN.
inline double at_least_or_nan(double x, double low) { return x < low ? low : x; }
inline double at_most_or_nan(double x, double high) { return x > high ? high : x; }

// Error of every step, everything last: by skipping alone, its upper bound, and what quantization
// adds.
struct Curves {
  const BudgetRules& rules;
  const BudgetSteps& steps;
  int64_t n;
  std::vector<double> error[2], bound[2], doubt[2], added;
  double noise = 0.0;

  Curves(const BudgetRules& r, const BudgetSteps& steps, const HeadFacts& f)
      : rules(r), steps(steps), n(f.n_steps), added(size_t(n + 1)) {
    const int64_t c = f.n_measured;
    double size = 0.0;
    for (int64_t i = 0; i < f.m; ++i) size += f.weights[i] * f.whole[i];
    std::vector<double> skipping = weighted(f, f.skipping, c), total = weighted(f, f.total, c + 1);
    const std::vector<double> mass = weighted(f, f.dropped, c);
    for (double& x : skipping) x /= size;
    for (double& x : total) x /= size;
    const double quantized = total.back();
    for (int64_t i = 0; i < f.m; ++i) {
      const double off = f.weights[i] * (f.total[i * (c + 1) + c] / size - quantized);
      noise += off * off;
    }
    noise = std::sqrt(noise);
    const std::vector<double> rate = error_per_mass(skipping, mass);
    const std::vector<double> rate_noise = noise_of_rate(f, rate, mass, size);
    for (int64_t s = 0; s < n; ++s) {
      const size_t at = size_t(steps.next_measured[s]);
      added[size_t(s)] = at_least_or_nan(total[at] - skipping[at], 0.0);
    }
    added[size_t(n)] = quantized;
    for (int k = 0; k < 2; ++k) {
      error[k].assign(size_t(n + 1), 0.0);
      bound[k].assign(size_t(n + 1), 0.0);
      doubt[k].assign(size_t(n + 1), 0.0);
      for (int64_t s = 0; s < n; ++s) {
        const double own = rate[size_t(steps.next_measured[s])], plain = own * f.mean[k][s];
        const double most = own * (f.mean[k][s] + rules.z * f.deviation[k][s] +
                                   rules.tail * f.heaviest[k][steps.sparser[s]]);
        bound[k][size_t(s)] = most;
        error[k][size_t(s)] = plain + rules.lean * (most - plain);
        const double of_rate = rules.z * f.mean[k][s] * rate_noise[size_t(steps.next_measured[s])];
        doubt[k][size_t(s)] = std::sqrt((most - plain) * (most - plain) + of_rate * of_rate);
      }
    }
  }

  // Means over the measured rows, of `n` numbers each.
  template <class T>
  static std::vector<double> weighted(const HeadFacts& f, const T* x, int64_t n) {
    std::vector<double> sums(static_cast<size_t>(n), 0.0);
    for (int64_t i = 0; i < f.m; ++i)
      for (int64_t s = 0; s < n; ++s) sums[size_t(s)] += f.weights[i] * double(x[i * n + s]);
    return sums;
  }
  std::vector<double> error_per_mass(const std::vector<double>& skipping,
                                     const std::vector<double>& mass) const {
    double errors = 0.0, masses = 0.0;
    for (size_t s = 0; s < size_t(rules.sparse_steps); ++s)
      errors += skipping[s], masses += mass[s];
    double whole = errors / at_least_or_nan(masses, 1e-9);
    whole = at_most_or_nan(at_least_or_nan(whole, rules.least_rate), rules.sparse_rate);
    std::vector<double> rate(skipping.size());
    for (size_t s = 0; s < rate.size(); ++s)
      rate[s] = at_most_or_nan((skipping[s] + whole * rules.prior) / (mass[s] + rules.prior),
                               rules.most_rate);
    return rate;
  }

  // Standard error of the error per mass of each measured step.
  std::vector<double> noise_of_rate(const HeadFacts& f, const std::vector<double>& rate,
                                    const std::vector<double>& mass, double size) const {
    const size_t c = rate.size();
    std::vector<double> noise_of(c, 0.0);
    for (int64_t i = 0; i < f.m; ++i)
      for (size_t s = 0; s < c; ++s) {
        const size_t at = size_t(i) * c + s;
        const double off = f.weights[i] * (f.skipping[at] / size - rate[s] * double(f.dropped[at]));
        noise_of[s] += off * off;
      }
    for (size_t s = 0; s < c; ++s) noise_of[s] = std::sqrt(noise_of[s]) / (mass[s] + rules.prior);
    return noise_of;
  }

  // The budget below which the head's precision is raised.
  double threshold() const {
    const double x = (added[size_t(n)] + noise) / rules.raise_from;
    return x == x ? at_most_or_nan(x, DBL_MAX) : 0.0;
  }

  // Small budgets look at all surveyed rows.
  int kind(double budget) const { return budget < rules.small_budget; }

  // The sparsest step such that it and all denser ones are within the budget; from there on the
  // sparsest whose error is known well enough.
  int64_t step(double budget, bool raised) const {
    const std::vector<double>&e = error[kind(budget)], &b = bound[kind(budget)];
    const double own_noise = raised ? 0.0 : noise;
    int64_t found = n;
    for (int64_t s = n - 1; s >= 0; --s) {
      const size_t at = size_t(s);
      const double more = raised ? 0.0 : added[at];
      if (!(b[at] + more + own_noise <= budget)) break;
      const double apart = doubt[kind(budget)][at];
      if (apart <= rules.resolved * at_least_or_nan(e[at] + more, rules.least_error)) found = s;
    }
    return found;
  }
  // The densest step that this budget or any larger one takes: see `_sparsest` in
  // rules/error_budget.py.
  int64_t densest_of_larger(double budget, bool raised, double above) const {
    const double edge = rules.small_budget;
    int64_t found = step(budget, raised);
    if (budget < edge) found = std::max(found, step(edge, raised && edge < above));
    if (raised) found = std::max(found, step(std::max(above, budget), false));
    return found;
  }
  static double finite(double x) { return std::fabs(x) < INFINITY ? x : 0.0; }
  double error_at(int64_t s, double budget, bool raised) const {
    return finite(error[kind(budget)][size_t(s)] + (raised ? 0.0 : added[size_t(s)]));
  }
  double bound_at(int64_t s, double budget, bool raised) const {
    const double more = raised ? 0.0 : added[size_t(s)];
    return finite(bound[kind(budget)][size_t(s)] + more + (raised ? 0.0 : noise));
  }
};

// Heads [B, Hq] of Hk key heads: steps, and [3][B · Hq] error, bound and whether it is raised.
inline void decide(const std::vector<std::unique_ptr<Curves>>& heads, const Shape& s,
                   const double* budget, bool may_raise, int64_t* steps, double* measured) {
  const int64_t group = s.group(), n = s.B * s.Hq;
  for (int64_t h_k = 0; h_k < s.Hk; ++h_k) {
    bool raised = false;
    double above = may_raise ? -DBL_MAX : 0.0;
    for (int64_t h = h_k * group; may_raise && h < (h_k + 1) * group; ++h) {
      double lowest = heads[size_t(h)]->threshold();
      for (int64_t b = 1; b < s.B; ++b)
        lowest = std::max(lowest, heads[size_t(b * s.Hq + h)]->threshold());
      raised |= budget[h] < lowest;
      above = std::max(above, lowest);
    }
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = h_k * group; h < (h_k + 1) * group; ++h) {
        const int64_t at = b * s.Hq + h;
        const Curves& own = *heads[size_t(at)];
        steps[at] = own.densest_of_larger(budget[h], raised, above);
        measured[at] = own.error_at(steps[at], budget[h], raised);
        measured[n + at] = own.bound_at(steps[at], budget[h], raised);
        measured[2 * n + at] = raised;
      }
  }
}

}  // namespace sparge
