// Python bindings of the native core. Tensors come as addresses: gradwire/kernels/native.py sees to it that they are
// contiguous, of the right type and size, and alive; nothing is ever converted or copied on the way.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "crc32.h"
#include "frame.h"
#include "memory.h"
#include "mesh.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;
using gradwire::Format;
using gradwire::RandomKey;

namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Address = std::uintptr_t;
using Index = std::int64_t;
// Address of the matrix, of the left and right factors and of the result; rows, columns, rank.
using MatrixArguments = std::tuple<Address, Address, Address, Address, Index, Index, int>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class Work>
auto unlocked(Work&& work) {
  nb::gil_scoped_release released;
  return std::forward<Work>(work)();
}

nb::object take(std::size_t bytes) {
  void* memory = gradwire::take_memory(bytes);
  struct Owned {
    void* memory;
    std::size_t bytes;
  };
  auto* owned = new (std::nothrow) Owned{memory, bytes};
  if (!owned) {
    gradwire::give_back_memory(memory, bytes);
    throw std::bad_alloc();
  }
  nb::capsule owner(owned, [](void* p) noexcept {
    auto* o = static_cast<Owned*>(p);
    gradwire::give_back_memory(o->memory, o->bytes);
    delete o;
  });
  return nb::cast(nb::ndarray<nb::pytorch, std::uint8_t>(memory, {bytes}, owner));
}

// A mesh that keeps what it sends alive.
class Connections {
 public:
  explicit Connections(const std::vector<std::pair<int, int>>& sockets) : mesh_(sockets) {}

  std::uint64_t send(int rank, std::uint64_t tag, Address data, std::size_t bytes, nb::object owner) {
    forget();
    const auto ticket = unlocked([&] { return mesh_.send(rank, tag, at<const std::uint8_t>(data), bytes); });
    if (mesh_.sent(rank) < ticket) kept_.push_back({rank, ticket, std::move(owner)});
    return ticket;
  }

  // None when the rank is silent.
  nb::object receive(int rank, std::uint64_t tag, double patience_s) {
    gradwire::Message message;
    const auto outcome = unlocked([&] { return mesh_.receive(rank, tag, patience_s, interrupt, message); });
    if (!heard(rank, outcome)) return nb::none();
    nb::capsule owner(message.data.get(), [](void* p) noexcept { gradwire::FreeMemory()(static_cast<std::uint8_t*>(p)); });
    return nb::cast(nb::ndarray<nb::pytorch, std::uint8_t>(message.data.release(), {message.bytes}, owner));
  }

  // False when the rank takes nothing.
  bool flush(int rank, std::uint64_t ticket, double patience_s) {
    return heard(rank, unlocked([&] { return mesh_.flush(rank, ticket, patience_s, interrupt); }));
  }

  void report(std::string text) {
    unlocked([&] { mesh_.report(std::move(text)); });
  }

  // None while it has not come.
  std::optional<nb::bytes> report_of(int rank) const {
    const auto text = mesh_.report_of(rank);
    if (!text) return std::nullopt;
    return nb::bytes(text->data(), text->size());
  }

  bool gone(int rank) const { return mesh_.gone(rank); }
  bool reported() const { return mesh_.reported(); }
  bool disturbed() const { return mesh_.disturbed(); }
  double silence(int rank) const { return mesh_.silence(rank); }

  // None where the kernel does not count.
  std::optional<std::int64_t> wire_bytes() const {
    const auto bytes = mesh_.wire_bytes();
    return bytes < 0 ? std::nullopt : std::optional(bytes);
  }

  void close() {
    unlocked([&] { mesh_.close(); });
    forget();
  }

 private:
  struct Kept {
    int rank;
    std::uint64_t ticket;
    nb::object owner;
  };

  static void interrupt() {
    nb::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }

  bool heard(int rank, gradwire::Mesh::Outcome outcome) const {
    if (outcome == gradwire::Mesh::Outcome::gone) throw std::runtime_error(mesh_.why_gone(rank));
    if (outcome == gradwire::Mesh::Outcome::reported) throw std::runtime_error("it was reported");
    return outcome == gradwire::Mesh::Outcome::done;
  }

  // Giving up an owner may let another thread in: by then what is kept must be in order.
  void forget() {
    std::vector<Kept> kept, done;
    for (auto& each : kept_) (mesh_.sent(each.rank) < each.ticket ? kept : done).push_back(std::move(each));
    kept_ = std::move(kept);
  }

  std::vector<Kept> kept_;  // guarded by Python's lock, and destroyed after the mesh has ended
  gradwire::Mesh mesh_;
};

std::vector<gradwire::Matrix> matrices_of(const std::vector<MatrixArguments>& arguments) {
  std::vector<gradwire::Matrix> matrices;
  for (const auto& [m, left, right, out, rows, columns, rank] : arguments)
    matrices.push_back({at<float>(m), at<float>(left), at<float>(right), at<float>(out), rows, columns, rank});
  return matrices;
}

void products(gradwire::Product what, const std::vector<MatrixArguments>& arguments, int threads) {
  const auto matrices = matrices_of(arguments);
  unlocked([&] { gradwire::products(what, matrices, threads); });
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that live to the end of a program are no leak
  m.doc() = "gradwire's native core. Use it through gradwire.kernels and gradwire.wire.";
  m.def(
      "crc32",
      [](const Bytes& data, std::uint32_t crc) {
        const unsigned char* bytes = data.data();
        const std::size_t size = data.size();
        return unlocked([&] { return gradwire::crc32(crc, bytes, size); });
      },
      "data"_a.noconvert(), "crc"_a = 0u, "CRC-32 of a byte array, equal to zlib.crc32.");

  m.def("instruction_sets", &gradwire::instruction_sets, "Those this machine runs, the best one last.");
  m.def("instruction_set", &gradwire::instruction_set, "The one in use.");
  m.def("use_instruction_set", &gradwire::use_instruction_set, "name"_a, "Use another one: for tests and benchmarks.");

  m.def("take_memory", &take, "nbytes"_a, "A uint8 tensor of memory that is kept for the next one of its size.");
  m.def("kept_memory", &gradwire::kept_memory, "Bytes that are kept and not in use.");
  m.def("release_memory", &gradwire::release_memory, "Give what is kept to the system.");

  nb::class_<Format>(m, "Format")
      .def(
          "__init__",
          [](Format* self, int kind, int scale_type, int scaling, int bits, int mantissa, Index block, float limit,
             float reciprocal, float largest_scale, float start, int rounds, float shrink, float floor) {
            new (self) Format{gradwire::Kind(kind), gradwire::ScaleType(scale_type), gradwire::Scaling(scaling), bits,
                              mantissa, block, limit, reciprocal, largest_scale, start, rounds, shrink, floor};
          },
          nb::kw_only(), "kind"_a, "scale_type"_a, "scaling"_a, "bits"_a, "mantissa"_a, "block"_a, "limit"_a,
          "reciprocal"_a, "largest_scale"_a, "start"_a, "rounds"_a, "shrink"_a, "floor"_a);
  nb::class_<Connections>(m, "Connections")
      .def(nb::init<const std::vector<std::pair<int, int>>&>())
      .def("send", &Connections::send)
      .def("receive", &Connections::receive)
      .def("flush", &Connections::flush)
      .def("report", &Connections::report)
      .def("report_of", &Connections::report_of)
      .def("gone", &Connections::gone)
      .def("reported", &Connections::reported)
      .def("disturbed", &Connections::disturbed)
      .def("silence", &Connections::silence)
      .def("wire_bytes", &Connections::wire_bytes)
      .def("close", &Connections::close);
  nb::class_<RandomKey>(m, "RandomKey").def(nb::init<std::uint64_t, std::uint64_t, std::uint32_t, std::uint32_t>());

  m.def("encode_blocks", [](const Format& format, const RandomKey& key, Address x, Address residual, float decay,
                            Index count, Address codes, Address scales, Address rest, int threads) {
    gradwire::Encode a{format, key, at<const float>(x), at<const float>(residual), decay, count,
                       at<std::uint8_t>(codes), at<void>(scales), at<float>(rest), false};
    return unlocked([&] { return gradwire::encode_blocks(a, threads); });
  });
  m.def("encode_frame", [](const Format& format, const RandomKey& key, Address x, Address residual, float decay,
                           Index count, Address frame, std::size_t bytes, nb::bytes header, std::size_t codes,
                           std::size_t scales, Address rest, int threads) {
    gradwire::Encode a{format, key, at<const float>(x), at<const float>(residual), decay, count,
                       at<std::uint8_t>(frame + codes), at<void>(frame + scales), at<float>(rest), false};
    const auto* head = static_cast<const std::uint8_t*>(header.data());
    const std::size_t head_bytes = header.size();
    return unlocked([&] { return gradwire::encode_frame(a, at<std::uint8_t>(frame), bytes, head, head_bytes, threads); });
  });
  m.def("check_frame", [](Address frame, std::size_t bytes, nb::bytes header) {
    const auto* head = static_cast<const std::uint8_t*>(header.data());
    const std::size_t head_bytes = header.size();
    return unlocked([&] { return int(gradwire::check_frame(at<const std::uint8_t>(frame), bytes, head, head_bytes)); });
  });
  m.def("decode_blocks", [](const Format& format, const std::vector<std::pair<Address, Address>>& payloads,
                            Index code_bytes, Address out, Index count, bool add, int threads) {
    unlocked([&] {
      for (std::size_t first = 0; first < payloads.size(); first += gradwire::kMostPayloads) {
        gradwire::Decode a{};
        a.format = format, a.count = count, a.code_bytes = code_bytes, a.out = at<float>(out);
        a.add = add || first > 0;
        a.payloads = int(std::min<std::size_t>(payloads.size() - first, gradwire::kMostPayloads));
        for (int p = 0; p < a.payloads; ++p) {
          a.codes[p] = at<const std::uint8_t>(payloads[first + std::size_t(p)].first);
          a.scales[p] = at<const void>(payloads[first + std::size_t(p)].second);
        }
        gradwire::decode_blocks(a, threads);
      }
    });
  });
  m.def("accumulate", [](Address x, Address residual, float decay, Address e, Index count, int threads) {
    return unlocked([&] {
      return gradwire::accumulate(at<const float>(x), at<const float>(residual), decay, at<float>(e), count, threads);
    });
  });
  m.def("divide", [](Address x, float by, Index count, int threads) {
    return unlocked([&] { return gradwire::divide(at<float>(x), by, count, threads); });
  });
  m.def("clean", [](Address x, Address e, Index count) {
    unlocked([&] { gradwire::clean(at<const float>(x), at<float>(e), count); });
  });
  m.def("random_bits", [](const RandomKey& key, Address out, Index count, int threads) {
    unlocked([&] { gradwire::random_bits(key, at<Index>(out), count, threads); });
  });
  m.def("pack_bits", [](Address codes, int bits, Index count, Address out) {
    unlocked([&] { gradwire::pack_bits(at<const Index>(codes), bits, count, at<std::uint8_t>(out)); });
  });
  m.def("unpack_bits", [](Address data, Index bytes, int bits, Index count, Address out) {
    unlocked([&] { gradwire::unpack_bits(at<const std::uint8_t>(data), bytes, bits, count, at<Index>(out)); });
  });
  m.def("select_top", [](Address x, Index count, Index wanted, Address out, int threads) {
    unlocked([&] { gradwire::select_top(at<const float>(x), count, wanted, at<Index>(out), threads); });
  });
  m.def("select_at_least", [](Address x, Index count, float tau, int threads) {
    auto* found = new std::vector<Index>;
    nb::capsule owner(found, [](void* p) noexcept { delete static_cast<std::vector<Index>*>(p); });
    unlocked([&] { *found = gradwire::select_at_least(at<const float>(x), count, tau, threads); });
    return nb::cast(nb::ndarray<nb::pytorch, Index>(found->data(), {found->size()}, owner));
  });
  m.def("select_block_top", [](Address x, Index count, Index each, Index block, Address out, int threads) {
    unlocked([&] { gradwire::select_block_top(at<const float>(x), count, each, block, at<Index>(out), threads); });
  });
  m.def("select_random", [](const RandomKey& key, Index total, Index count, Address out, int threads) {
    unlocked([&] { gradwire::select_random(key, total, count, at<Index>(out), threads); });
  });
  m.def("scatter", [](Address out, Index count, Address indices, Address values, Index n, bool add) {
    unlocked([&] {
      gradwire::scatter(at<float>(out), count, at<const Index>(indices), at<const float>(values), n, add);
    });
  });
  m.def("gather", [](Address x, Index count, Address indices, Address values, Index n) {
    unlocked([&] { gradwire::gather(at<const float>(x), count, at<const Index>(indices), at<float>(values), n); });
  });
  m.def("pack_indices", [](Address indices, Index n, Index total, int width, Address out) {
    unlocked([&] { gradwire::pack_indices(at<const Index>(indices), n, total, width, at<std::uint8_t>(out)); });
  });
  m.def("unpack_indices", [](Address data, Index total, Index n, int width, Address out) {
    return unlocked(
        [&] { return gradwire::unpack_indices(at<const std::uint8_t>(data), total, n, width, at<Index>(out)); });
  });
  m.def("rotate", [](const RandomKey& key, Address x, Index count, Index block, bool inverse, float limit, float factor,
                     Address out, int threads) {
    unlocked([&] {
      gradwire::rotate(key, at<const float>(x), count, block, inverse, limit, factor, at<float>(out), threads);
    });
  });
  m.def("thin_products", [](const std::vector<MatrixArguments>& matrices, int threads) {
    products(gradwire::Product::thin, matrices, threads);
  });
  m.def("thin_products_of_sums", [](const std::vector<MatrixArguments>& arguments,
                                    const std::vector<std::pair<Address, Address>>& terms, int threads) {
    auto matrices = matrices_of(arguments);
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      matrices[i].x = at<const float>(terms.at(i).first);
      matrices[i].residual = at<const float>(terms.at(i).second);
    }
    unlocked([&] { gradwire::products(gradwire::Product::thin, matrices, threads); });
  });
  m.def("thin_transposed_products", [](const std::vector<MatrixArguments>& matrices, int threads) {
    products(gradwire::Product::thin_transposed, matrices, threads);
  });
  m.def("outer_residual", [](const std::vector<MatrixArguments>& matrices, int threads) {
    products(gradwire::Product::outer, matrices, threads);
  });
  m.def("outer_mean", [](const std::vector<MatrixArguments>& matrices, int threads) {
    products(gradwire::Product::mean, matrices, threads);
  });
  m.def("orthogonalize", [](const std::vector<std::tuple<Address, Address, Index, int>>& factors, double shift,
                            double least) {
    unlocked([&] {
      for (const auto& [in, out, rows, rank] : factors)
        gradwire::orthogonalize({at<const float>(in), at<float>(out), rows, rank}, shift, least);
    });
  });
}
