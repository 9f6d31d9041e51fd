// Attention of one query block: two schedules of the steps in walk.h.
//
//   in turn      scores → softmax → accumulate, for vector products
//   interleaved  scores of the next step, exponentials of this one and accumulation of the
//                previous unit overlap, so that tile unit and vector ports are both busy
#pragma once

#include "walk.h"

namespace sparge {
namespace {

template <Product QK, Product PV, int kDegree>
struct InTurn : Walk<QK, PV, kDegree> {
  using W = Walk<QK, PV, kDegree>;
  using Slot = typename W::Slot;
  using W::acc_of, W::decide, W::exponentiate, W::fetch, W::join, W::k_scales, W::kFast, W::kPSteps;
  using W::mask_step, W::multiply, W::n_units, W::p_scale, W::scale, W::scales_of, W::slots;
  using W::sums, W::take_chunk, W::v_scale_of, W::W, W::weights_of, W::width;

  void walk(const int32_t* kept, int n) {
    for (int i = 0; i < n; ++i) {
      take_chunk(kept + i, 1);
      const Slot& slot = slots[0];
      const float* k_scale = scales_of(slot, k_scales);
      for (int unit = 0; unit < n_units; ++unit) {
        if (i + 1 < n) fetch(kept[i + 1], unit, kGroups);
        const bool attends = mask_step(unit, slot, 0);
        if (attends) {
          for (int quarter = 0; quarter < 4; ++quarter) multiply(unit, slot, 0, quarter);
          for (int quarter = 0; quarter < 4; ++quarter) scale(unit, slot, 0, quarter, k_scale);
        }
        // One block at a time: no pending P depends on the old shift.
        if (!decide(unit, slot, 0, attends, [](int) {})) continue;
        exponentiate(unit, 0, 0, 0, 0, 0, kBlockK);
        const float* p = weights_of(0, 0, 0);
        if constexpr (kFast) {
          product<PV>(slot.value, width, p, kPSteps, sums, false);
          join(unit, sums, p_scale[0][0][0], v_scale_of(slot), 0, width);
        } else {
          product<PV>(slot.value, width, p, kPSteps, acc_of(unit), true);
        }
      }
    }
  }
};

// A step is one unit and one key block of a chunk.
template <Product QK, Product PV, int kDegree>
struct Interleaved : Walk<QK, PV, kDegree> {
  using W = Walk<QK, PV, kDegree>;
  using Slot = typename W::Slot;
  using W::acc_of, W::decide, W::exponentiate, W::fetch, W::join, W::kChunk, W::kFast, W::kPSteps,
      W::kUnit;
  using W::mask_step, W::multiply, W::n_slots, W::n_units, W::p_scale, W::scale, W::scales_of;
  using W::slots, W::sums, W::take_chunk, W::v_scale_of, W::W, W::weights_of, W::width;
  static_assert(!W::kTile || kChunk == 4, "a step has four parts, each takes a block of the chunk");

  // P of a unit over a chunk, waiting to be multiplied with V.
  struct Pending {
    int unit = -1, parity = 0, n = 0;
    int items_done = 0;
    int slot[kChunk] = {};
    const char* v_tile[kChunk] = {};
    const float* v_scale[kChunk] = {};
  } pending, open;  // `open` is the unit whose P is being computed

  // One item is 32 rows of the accumulator of the pending unit, over all of its blocks; this
  // multiplies block i. 8-bit sums go to `sums` and are added by join_item: reading them at once
  // would stall on the tile unit.
  void multiply_item(int i) {
    if (i >= pending.n) return;
    const int64_t first = int64_t(pending.items_done) * 2 * kLanes;
    const float* p0 = weights_of(pending.parity, pending.slot[i], 0);
    const float* p1 = weights_of(pending.parity, pending.slot[i], 1);
    const char* v = pending.v_tile[i] + first * kPSteps * 4;
    if constexpr (kFast) {
      tile_bytes(v, p0, p1, sums);
    } else {
      float* c0 = acc_of(pending.unit * kUnit) + first * kLanes;
      float* c1 = acc_of(pending.unit * kUnit + 1) + first * kLanes;
      tile_accumulate(v, p0, p1, c0, c1, i == 0, i + 1 == pending.n);
    }
  }
  void join_item(int i) {
    if (!kFast || i >= pending.n) return;
    const int64_t first = int64_t(pending.items_done) * 2 * kLanes, last = first + 2 * kLanes;
    for (int u = 0; u < 2; ++u)
      join(pending.unit * kUnit + u, sums + u * 2 * kLanes * kLanes,
           p_scale[pending.parity][pending.slot[i]][u], pending.v_scale[i], first, last);
  }
  void end_item() {
    if (++pending.items_done == width / (2 * kLanes)) pending.unit = -1;
  }
  void finish_items() {
    while (pending.unit >= 0) {
      for (int i = 0; i < pending.n; ++i) multiply_item(i), join_item(i);
      end_item();
    }
  }
  void finish_pending(int unit) {
    if (pending.unit == unit) finish_items();
    // Blocks of this chunk whose P was computed with the old shift.
    if (open.unit == unit && open.n) {
      const Pending other = pending;
      pending = open;
      finish_items();
      pending = other;
      open.n = 0;
    }
  }
  void walk(const int32_t* kept, int n) {
    int p_parity = 0, parity = 0;
    alignas(64) float room[2][kBlockK];
    bool attends[2] = {};
    const float* k_scale[2];
    auto take = [&](int from) { take_chunk(kept + from, n - from < kChunk ? n - from : kChunk); };
    if (n) {
      take(0);
      attends[0] = prepare(0, 0, room, k_scale);
    }
    for (int quarter = 0; attends[0] && quarter < 4; ++quarter) multiply(0, slots[0], 0, quarter);
    for (int quarter = 0; attends[0] && quarter < 4; ++quarter)
      scale(0, slots[0], 0, quarter, k_scale[0]);
    for (int from = 0; from < n; from += kChunk) {
      const int held = n_slots, n_steps = n_units * held;
      for (int step = 0; step < n_steps; ++step, parity ^= 1) {
        const int unit = step / held, slot = step % held, other = parity ^ 1;
        if (slot == 0) open = Pending{}, open.unit = unit, open.parity = p_parity;
        const unsigned active = decide(unit, slots[slot], parity, attends[parity],
                                       [this](int u) { finish_pending(u); });
        if (active) {
          open.slot[open.n] = slot;
          open.v_tile[open.n] = slots[slot].v_tile;
          open.v_scale[open.n++] = v_scale_of(slots[slot]);
        }
        const int later = from + kChunk + slot;
        // The next step; after the last one, the first of the next chunk.
        const bool ends = step + 1 == n_steps, more = !ends || from + kChunk < n;
        const int ahead = ends ? 0 : step + 1;
        if (ends && more) take(from + kChunk);
        if (more) attends[other] = prepare(ahead, other, room, k_scale);
        const bool scored = more && attends[other];
        const int next_unit = ahead / n_slots;
        const Slot& next = slots[ahead % n_slots];
        for (int part = 0; part < 4; ++part) {
          // A few cache lines at a time; more would delay the tile loads.
          if (later < n) fetch(kept[later], unit * 4 + part, kGroups / kUnit * 4);
          if (scored) multiply(next_unit, next, other, part);
          half_step(active, unit, 0, parity, p_parity, slot, part);
        }
        const bool busy = pending.unit >= 0;
        for (int part = 0; part < 4; ++part) {
          if (busy) multiply_item(part);
          half_step(active, unit, 1, parity, p_parity, slot, part);
          if (scored) scale(next_unit, next, other, part, k_scale[other]);
          if (busy) join_item(part);
        }
        if (busy) end_item();
        if (slot + 1 == held) {
          finish_items();
          if (open.n) {
            pending = open;
            p_parity ^= 1;
          }
          open = Pending{};
        }
      }
    }
    finish_items();
  }
  bool prepare(int step, int parity, float room[2][kBlockK], const float** k_scale) {
    const Slot& slot = slots[step % n_slots];
    k_scale[parity] = scales_of(slot, room[parity]);
    return mask_step(step / n_slots, slot, parity);
  }
  void half_step(unsigned active, int unit, int u, int parity, int p_parity, int slot, int part) {
    constexpr int n = kBlockK / 4;
    if (active >> u & 1)
      exponentiate(unit, u, parity, p_parity, slot, part * n, part * n + n);
    else if (active && part == 0)
      std::memset(weights_of(p_parity, slot, u), 0, size_t(kPSteps) * kLanes * 4);
    if (active && !(active >> u & 1) && part == 0)
      std::memset(p_scale[p_parity][slot][u], 0, kLanes * 4);
  }
};

}  // namespace
}  // namespace sparge
