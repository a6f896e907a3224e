// Runs tasks on a team of OpenMP threads, the next free thread taking the next task.
#pragma once

#include <cstdint>
#include <functional>

#include "call.h"

namespace clearhead {

// Aligned memory of this thread, kept from call to call: fresh pages would cost more than small calls do.
// Throws std::bad_alloc.
char* thread_scratch(int64_t bytes);

// Calls work(i) for i = 0 … count - 1. `interrupt` is asked on the calling thread between tasks, at most every
// 50 ms. Exceptions of `work` do not leave the team: no_memory is returned for them.
Status run_tasks(int64_t count, int threads, const Interrupt& interrupt, const std::function<void(int64_t)>& work);

}  // namespace clearhead
