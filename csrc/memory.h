// Large buffers that are used again.
#pragma once

#include <cstddef>

namespace gradwire {

// A fresh 100 MB buffer costs more in page faults than the kernels that fill it. What is given back is kept for the
// next buffer of its size, but never more than is in use at the time and 64 MB.
void* take_memory(std::size_t bytes);
void give_back_memory(void* memory, std::size_t bytes) noexcept;
std::size_t kept_memory();   // bytes that are kept and not in use
void release_memory();       // gives all of them to the system

}  // namespace gradwire
