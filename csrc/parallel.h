// Threads of one call: those of torch, or started for it and gone with it. Nothing of ours runs between calls.
#pragma once

#include <cstdint>
#include <functional>

namespace gradwire {

using Work = std::function<void(std::int64_t begin, std::int64_t end)>;

// Does the work on [0, units) with at most `threads` threads, the calling one among them. They take shares of at least
// `least_units`, a multiple of `step`, as they come: a thread that finds its core taken costs a share, not its half.
// One thread takes all as one share.
void parallel(std::int64_t units, int threads, std::int64_t least_units, std::int64_t step, const Work& work);

}  // namespace gradwire
