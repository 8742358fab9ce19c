#include "frame.h"

#include <cstring>

#include "crc32.h"

namespace gradwire {
namespace {

// Places in the header, as gradwire/wire.py has them.
constexpr std::size_t kChecksum = 4, kVersion = 8, kFlags = 9, kLengths = 10, kSeed = 24, kStep = 32;

bool same(const std::uint8_t* a, const std::uint8_t* b, std::size_t begin, std::size_t end) {
  return std::memcmp(a + begin, b + begin, end - begin) == 0;
}

}  // namespace

std::int64_t encode_frame(Encode& encode, std::uint8_t* frame, std::size_t bytes, const std::uint8_t* header,
                          std::size_t header_bytes, int threads) {
  std::memcpy(frame, header, header_bytes);
  const std::int64_t bad = encode_blocks(encode, threads);
  frame[kFlags] = bad != 0;
  const std::uint32_t checksum = crc32(0, frame + kVersion, bytes - kVersion);
  for (int i = 0; i < 4; ++i) frame[kChecksum + std::size_t(i)] = std::uint8_t(checksum >> (8 * i));
  return bad;
}

Check check_frame(const std::uint8_t* frame, std::size_t bytes, const std::uint8_t* header, std::size_t header_bytes) {
  const bool ours = bytes >= header_bytes && frame[kFlags] <= 1 && same(frame, header, 0, kChecksum) &&
                    frame[kVersion] == header[kVersion] && same(frame, header, kLengths, kSeed) &&
                    same(frame, header, kStep, header_bytes);
  if (!ours) return Check::other;
  const std::uint32_t checksum = crc32(0, frame + kVersion, bytes - kVersion);
  std::uint32_t said = 0;
  for (int i = 0; i < 4; ++i) said |= std::uint32_t(frame[kChecksum + std::size_t(i)]) << (8 * i);
  if (said != checksum) return Check::other;
  return frame[kFlags] ? Check::non_finite : Check::finite;
}

}  // namespace gradwire
