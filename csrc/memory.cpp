#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

namespace gradwire {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::size_t kSlack = std::size_t{64} << 20;

struct Kept {
  void* memory;
  std::size_t bytes;
};

struct Store {
  std::mutex guard;
  std::list<Kept> kept;  // oldest first
  std::size_t kept_bytes = 0;
  std::size_t used_bytes = 0;

  void drop_oldest() {
    std::free(kept.front().memory);
    kept_bytes -= kept.front().bytes;
    kept.pop_front();
  }
};

Store& store() {
  static Store* only = new Store;  // never destroyed: tensors may outlive everything else
  return *only;
}

std::size_t rounded(std::size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

void* take_memory(std::size_t bytes) {
  bytes = rounded(bytes);
  Store& s = store();
  const std::lock_guard<std::mutex> lock(s.guard);
  s.used_bytes += bytes;
  for (auto it = s.kept.rbegin(); it != s.kept.rend(); ++it)
    if (it->bytes == bytes) {
      void* memory = it->memory;
      s.kept_bytes -= bytes;
      s.kept.erase(std::next(it).base());
      return memory;
    }
  void* memory = std::aligned_alloc(kHugePage, bytes);
  if (!memory) {
    s.used_bytes -= bytes;
    throw std::bad_alloc();
  }
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

void give_back_memory(void* memory, std::size_t bytes) noexcept {
  bytes = rounded(bytes);
  Store& s = store();
  const std::lock_guard<std::mutex> lock(s.guard);
  s.used_bytes -= bytes;
  try {
    s.kept.push_back({memory, bytes});
    s.kept_bytes += bytes;
  } catch (const std::bad_alloc&) {
    std::free(memory);
  }
  while (s.kept_bytes > s.used_bytes + kSlack) s.drop_oldest();
}

std::size_t kept_memory() {
  Store& s = store();
  const std::lock_guard<std::mutex> lock(s.guard);
  return s.kept_bytes;
}

void release_memory() {
  Store& s = store();
  const std::lock_guard<std::mutex> lock(s.guard);
  while (!s.kept.empty()) s.drop_oldest();
}

}  // namespace gradwire
