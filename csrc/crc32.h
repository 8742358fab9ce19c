// CRC-32 (ISO-HDLC, the one of zlib, gzip and Ethernet) of a byte range.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gradwire {

// Continues `crc` (0 for a fresh sum) over `size` bytes. Equal to zlib's crc32 for every input.
std::uint32_t crc32(std::uint32_t crc, const unsigned char* data, std::size_t size);

}  // namespace gradwire
