#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gradwire {
namespace {

// The numeric law keeps denormals, whatever the calling thread has set (torch.set_flush_denormal).
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ & ~(std::uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  std::uint64_t before_;
#endif
};

// Runs `run` on so many threads: torch's own, where it has them. They spin for a while after each of torch's operations,
// so threads of ours would find their cores taken.
void together(int workers, const std::function<void()>& run) {
  if (workers == 1) return run();
  using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);
  if (const auto team = reinterpret_cast<Team>(dlsym(RTLD_DEFAULT, "GOMP_parallel")))
    return team([](void* it) { (*static_cast<const std::function<void()>*>(it))(); },
                const_cast<std::function<void()>*>(&run), unsigned(workers), 0);
  std::vector<std::thread> started;
  started.reserve(std::size_t(workers));
  try {
    while (int(started.size()) + 1 < workers) started.emplace_back(run);
  } catch (...) {  // no more threads to be had: those there are do the work
  }
  run();
  for (auto& thread : started) thread.join();
}

}  // namespace

void parallel(std::int64_t units, int threads, std::int64_t least_units, std::int64_t step, const Work& work) {
  if (units <= 0) return;
  const std::int64_t each = (std::max<std::int64_t>(1, least_units) + step - 1) / step * step;
  const std::int64_t workers = std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(1, units / each));
  const std::int64_t share = workers == 1 ? units : each;
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex guard;
  const auto run = [&] {
    try {
      [[maybe_unused]] const KeepDenormals kept;
      for (std::int64_t begin; (begin = next.fetch_add(share)) < units;) work(begin, std::min(units, begin + share));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      error = std::current_exception();
      next = units;
    }
  };
  together(int(workers), run);
  if (error) std::rethrow_exception(error);
}

}  // namespace gradwire
