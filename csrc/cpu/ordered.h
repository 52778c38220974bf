// Sums to which many tasks add, always in the same order, so that the bits do not depend on the number of threads.
//
// Tasks 0, 1, ... add to each sum, in this order, on whichever threads they run. A sum consists of parts. A task visits
// parts in ascending order, and may leave some out; it adds to a part once the task before it has gone past that part.
// So the tasks of a sum run side by side, each a little behind the one before. There are slots of memory for a few sums
// at a time: a sum begins when an earlier one has left its slot.
#pragma once

#include <atomic>
#include <cstring>
#include <thread>

#include "scratch.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class A> class OrderedSums {
  using Counter = std::atomic<int64_t>;
  static constexpr int64_t kAllParts = INT64_MAX;

  int64_t sums_, tasks_, size_, slots_;
  A* memory_;        // [slots][size]
  Counter* left_;    // [slots], how many sums have left the slot
  Counter* passed_;  // [sums][tasks], how many parts the task has gone past

  static void wait_for(const Counter& counter, int64_t wanted) {
    while (counter.load(std::memory_order_acquire) < wanted) std::this_thread::yield();
  }
  static void set(Counter& counter, int64_t count) { counter.store(count, std::memory_order_release); }

 public:
  // `sums` sums of `size` elements, each with addends from `tasks` tasks.
  OrderedSums(Arena& arena, int64_t sums, int64_t tasks, int64_t size, int64_t workers)
      : sums_(sums),
        tasks_(tasks),
        size_(size),
        slots_(min(2 * workers, sums)),
        memory_(arena.take<A>(slots_ * size)),
        left_(arena.take<Counter>(slots_)),
        passed_(arena.take<Counter>(sums * tasks)) {}

  // Must run before the first task.
  void reset() {
    for (int64_t i = 0; i < slots_; i++) new (left_ + i) Counter(0);
    for (int64_t i = 0; i < sums_ * tasks_; i++) new (passed_ + i) Counter(0);
  }

  struct Task {
    int64_t sum, task;
  };
  int64_t count() const { return sums_ * tasks_; }
  // The tasks in the order in which they must start: a task only waits for tasks before it. Sums take turns, as many as
  // there are slots, so a task rarely has to wait.
  Task operator[](int64_t index) const {
    const int64_t block = index / (slots_ * tasks_), rest = index % (slots_ * tasks_);
    const int64_t side_by_side = min(slots_, sums_ - block * slots_);
    return {block * slots_ + rest % side_by_side, rest / side_by_side};
  }

  // The memory of the task's sum, zeroed before the first task.
  A* begin(Task t) {
    A* memory = memory_ + t.sum % slots_ * size_;
    if (t.task == 0) {
      wait_for(left_[t.sum % slots_], t.sum / slots_);
      std::memset(static_cast<void*>(memory), 0, size_ * sizeof(A));
    }
    return memory;
  }
  // Runs add() when it is the task's turn to add to `part`.
  template <class Add> INLINE void in_turn(Task t, int64_t part, Add&& add) {
    Counter* passed = passed_ + t.sum * tasks_ + t.task;
    if (t.task > 0) wait_for(passed[-1], part + 1);
    add();
    set(passed[0], part + 1);
  }
  // Ends the task. The last task of a sum runs take(), which copies the finished sum out of the memory.
  template <class Take> void end(Task t, Take&& take) {
    Counter* passed = passed_ + t.sum * tasks_ + t.task;
    if (t.task > 0) wait_for(passed[-1], kAllParts);
    if (t.task == tasks_ - 1) {
      take();
      set(left_[t.sum % slots_], t.sum / slots_ + 1);
    }
    set(passed[0], kAllParts);
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
