// A small thread pool for sweeps over memory: tasks are numbered, threads take the next number.
#pragma once

#include <cstddef>

namespace overspill {

using TaskFn = void (*)(void* context, std::size_t task);

// Sets how many threads run a job, the caller among them (1 runs everything in the caller). Waits
// for a job in progress. Throws std::invalid_argument if count is not in 1..256.
void set_pool_threads(int count);
int pool_threads();

// Runs fn(context, task) for every task in [0, tasks) and returns when all are done. A second
// caller while a job is running does its tasks itself, so nothing ever waits in a queue.
void run_tasks(std::size_t tasks, TaskFn fn, void* context);

template <class Fn>
void parallel(std::size_t tasks, Fn& fn) {
  run_tasks(
      tasks, [](void* context, std::size_t task) { (*static_cast<Fn*>(context))(task); }, &fn);
}

}  // namespace overspill
