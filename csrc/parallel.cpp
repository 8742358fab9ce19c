#include "parallel.h"

#include <algorithm>
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

}  // namespace

void parallel(std::int64_t units, int threads, std::int64_t least_units, std::int64_t step,
              const std::function<void(int, std::int64_t, std::int64_t)>& work) {
  if (units <= 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, units / std::max<std::int64_t>(1, least_units));
  const std::int64_t shares = std::clamp<std::int64_t>(threads, 1, most);
  const std::int64_t each = ((units + shares - 1) / shares + step - 1) / step * step;
  std::exception_ptr error;
  std::mutex guard;
  const auto run = [&](int share) {
    try {
      [[maybe_unused]] const KeepDenormals kept;
      const std::int64_t begin = share * each, end = std::min(units, begin + each);
      if (begin < end) work(share, begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      error = std::current_exception();
    }
  };
  std::vector<std::thread> started;
  started.reserve(std::size_t(shares));
  int share = 1;
  try {
    for (; share < shares; ++share) started.emplace_back(run, share);
  } catch (...) {  // no more threads to be had: this one does the rest
  }
  run(0);
  for (; share < shares; ++share) run(share);
  for (auto& thread : started) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace gradwire
