// How work is shared out over threads: single rows, and query rows whose keys are taken in splits.
#pragma once

#include <algorithm>
#include <cstring>

#include "../kernels.h"
#include "scratch.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

// f(row) for each row in [0, rows).
template <class F> void for_each_row(const Runner& runner, int64_t rows, F&& f) {
  constexpr int64_t chunk = 64;  // rows per task
  runner.run(ceil_div(rows, chunk), [&](int64_t, int64_t index) {
    for (int64_t row = index * chunk; row < min(rows, (index + 1) * chunk); row++) f(row);
  });
}

// The states of some query rows, as softmax.h has them.
template <class A> struct RowStates {
  int64_t rows, dims;
  A *m, *l;  // [rows]
  A* acc;    // [rows * dims], in the layout of the kernel

  RowStates(Arena& arena, int64_t rows, int64_t dims)
      : rows(rows), dims(dims), m(arena.take<A>(rows)), l(arena.take<A>(rows)), acc(arena.take<A>(rows * dims)) {}

  void clear() const {
    std::fill_n(m, rows, A(kHidden));
    std::memset(static_cast<void*>(l), 0, rows * sizeof(A));
    std::memset(static_cast<void*>(acc), 0, rows * dims * sizeof(A));
  }
};

// Runs a kernel that takes the keys of each unit of query rows in splits. A split leaves the states of the unit's rows;
// the states of all splits are folded in order, so the bits do not depend on who computed them. The kernel has
//     units, splits              how many there are
//     splits_in_parallel(n)      whether n workers take the splits of a unit side by side; never with one split
//     workspace(memory), take_states(arena)
//     unit(index)                describes a unit; its `queries` are 0 where it has no rows
//     run_split(unit, split, workspace, states), fold(total, states), finish(unit, workspace, states)
template <class Kernel> class SplitRunner {
 public:
  explicit SplitRunner(const Kernel& kernel) : kernel_(kernel) {}

  int64_t scratch_bytes(int64_t workers) const {
    const int64_t states = kernel_.splits_in_parallel(workers) ? kernel_.units * kernel_.splits : 0;
    return workers * workspace_bytes_ + states * states_bytes_;
  }

  void run(char* scratch, const Runner& runner) const {
    const int64_t splits = kernel_.splits;
    const bool parallel = kernel_.splits_in_parallel(runner.workers);
    auto workspace = [&](int64_t worker) { return kernel_.workspace(scratch + worker * workspace_bytes_); };
    auto split_states = [&](int64_t index) {
      Arena arena(scratch + runner.workers * workspace_bytes_ + index * states_bytes_);
      return kernel_.take_states(arena);
    };
    if (parallel)
      runner.run(kernel_.units * splits, [&](int64_t worker, int64_t index) {
        auto unit = kernel_.unit(index / splits);
        if (unit.queries > 0) kernel_.run_split(unit, index % splits, workspace(worker), split_states(index));
      });
    runner.run(kernel_.units, [&](int64_t worker, int64_t index) {
      auto unit = kernel_.unit(index);
      if (unit.queries <= 0) return;
      auto w = workspace(worker);
      if (splits == 1) {
        kernel_.run_split(unit, 0, w, w.states);
        return kernel_.finish(unit, w, w.states);
      }
      w.total.clear();
      for (int64_t split = 0; split < splits; split++) {
        auto states = parallel ? split_states(index * splits + split) : w.states;
        if (!parallel) kernel_.run_split(unit, split, w, states);
        kernel_.fold(w.total, states);
      }
      kernel_.finish(unit, w, w.total);
    });
  }

 private:
  const Kernel& kernel_;
  const int64_t workspace_bytes_ = kernel_.workspace(nullptr).arena.bytes();
  const int64_t states_bytes_ = [this] {
    Arena arena(nullptr);
    kernel_.take_states(arena);
    return arena.bytes();
  }();
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
