// Frames of gradwire/wire.py, written and checked in one call each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops.h"

namespace gradwire {

// Encode into a frame whose parts `encode` points to, behind the header; how many values are not finite.
std::int64_t encode_frame(Encode& encode, std::uint8_t* frame, std::size_t bytes, const std::uint8_t* header,
                          std::size_t header_bytes, int threads);

enum class Check { finite = 0, non_finite = 1, other = 2 };

// Whether these bytes are a sound frame with this header, but for its seed, which is the sender's.
Check check_frame(const std::uint8_t* frame, std::size_t bytes, const std::uint8_t* header, std::size_t header_bytes);

}  // namespace gradwire
