// Python bindings of the native core. Arrays are never converted: a wrong dtype or stride is a TypeError,
// because a silent conversion would make a kernel write into a temporary.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "crc32.h"

namespace nb = nanobind;
using namespace nb::literals;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NB_MODULE(_native, m) {
  m.doc() = "gradwire's native core. Use it through gradwire.kernels and gradwire.wire.";
  m.def(
      "crc32",
      [](const Bytes& data, std::uint32_t crc) {
        const unsigned char* bytes = data.data();
        const std::size_t size = data.size();
        nb::gil_scoped_release unlocked;
        return gradwire::crc32(crc, bytes, size);
      },
      "data"_a.noconvert(), "crc"_a = 0u, "CRC-32 of a byte array, equal to zlib.crc32.");
}
