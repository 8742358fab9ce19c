// Threads of one call: started for it and gone with it. Nothing runs between calls, and a fork finds nothing broken.
#pragma once

#include <cstdint>
#include <functional>

namespace gradwire {

// Splits [0, units) into at most `threads` contiguous shares whose starts are multiples of `step`, and runs them. A
// share is worth at least `least_units`, so that starting a thread never costs more than it saves.
void parallel(std::int64_t units, int threads, std::int64_t least_units, std::int64_t step,
              const std::function<void(int share, std::int64_t begin, std::int64_t end)>& work);

}  // namespace gradwire
