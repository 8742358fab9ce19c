#include "mesh.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <unordered_set>

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kAlignment = 64;
constexpr double kLongest = 1e8;  // seconds
constexpr auto kSlice = std::chrono::milliseconds(200);  // between looks for an interrupt
// Over slow links a wake-up a packet takes a fifth of a processor: of a long message so much is to come before the next.
constexpr std::size_t kPortion = 64 << 10, kLeastPortion = 16 << 10;
constexpr auto kPortionTime = std::chrono::milliseconds(20);  // and what came is looked at after so long in any case
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 40;  // of a message: beyond, it is no header of ours
// In place of a number of bytes: the header is a notice. Its tag is the number of bytes that follow.
constexpr std::uint64_t kBeat = 0xbea7'0000'6772'6164, kFarewell = kBeat + 1, kReport = kBeat + 2;
constexpr std::uint64_t kMostReport = 1 << 20;
constexpr auto kBeatTime = std::chrono::milliseconds(1000);

#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
#else
constexpr int kSendFlags = MSG_DONTWAIT;  // Python ignores SIGPIPE
#endif

struct Header {
  std::uint64_t tag;
  std::uint64_t bytes;
};

struct Outgoing {
  Header header;
  const std::uint8_t* data;
  std::size_t bytes;  // of data
  bool message;  // or a notice, which is not counted
  std::size_t gone = 0;  // bytes that have left, of header and data
};

// Bytes a connection has sent; negative where the kernel does not count them.
std::int64_t wire_bytes_of(int socket) {
#ifdef __linux__
  // Places in Linux's struct tcp_info, of which the C library knows the beginning only.
  constexpr std::size_t kOptions = 5, kSegmentsOut = 136, kBytesSent = 200, kSize = 208;
  std::uint8_t info[kSize];
  socklen_t size = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, info, &size) != 0 || size < kSize) return -1;  // before Linux 4.19
  std::uint32_t segments;
  std::uint64_t data;
  std::memcpy(&segments, info + kSegmentsOut, sizeof segments);
  std::memcpy(&data, info + kBytesSent, sizeof data);
  sockaddr_storage own{};
  socklen_t own_size = sizeof own;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size);
  const int ethernet = 14, internet = own.ss_family == AF_INET6 ? 40 : 20, tcp = 20 + 12 * (info[kOptions] & 1);
  return std::int64_t(data) + std::int64_t(segments) * (ethernet + internet + tcp);
#else
  (void)socket;
  return -1;
#endif
}

std::chrono::duration<double> since(Clock::time_point moment) { return Clock::now() - moment; }

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

void FreeMemory::operator()(std::uint8_t* memory) const { std::free(memory); }

struct Mesh::Peer {
  explicit Peer(int descriptor) : socket(descriptor), alive(Clock::now()) {}

  int socket;  // -1 once the mesh is closed
  // Of the thread alone: the message that is arriving.
  Header header{};
  Message arriving;
  std::size_t arrived = 0;  // bytes, of header and data
  int portion = 1;  // bytes that must have come before the thread is woken

  void ask_for(std::size_t missing) {
    const int wanted = missing < kLeastPortion ? 1 : int(std::min(missing, kPortion));
    if (wanted == portion) return;
    portion = wanted;
    ::setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &portion, sizeof portion);  // where it fails all is as without it
  }

  mutable std::mutex guard;
  std::condition_variable changed;
  std::deque<Outgoing> queue;
  std::unordered_map<std::uint64_t, std::deque<Message>> mail;
  std::uint64_t queued = 0, sent = 0;  // messages
  Clock::time_point heard{}, taken{};  // when bytes of a message last came, and bytes of anything last went
  Clock::time_point alive;  // when bytes of anything last came
  bool gone = false, farewell = false;
  std::string why;
  std::optional<std::string> report;
  std::int64_t wire_bytes = 0;  // once the socket is closed
  std::atomic<bool> wants_to_write{false};

  void leave(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(guard);
    if (gone) return;
    gone = true;
    why = reason;
    queue.clear();
    wants_to_write = false;
    ::shutdown(socket, SHUT_RDWR);
    changed.notify_all();
  }
};

// A child of this process has its descriptors too. It must not keep the connections open when the process ends, or the
// others would not notice. Handlers of fork are C's, for a child may be made by any library.
struct Forks {
  static Forks& all() {
    static Forks& forks = *new Forks;  // never destroyed: forks happen until the end
    return forks;
  }

  Forks() {
    ::pthread_atfork([] { all().guard.lock(); }, [] { all().guard.unlock(); },
                     [] {
                       for (Mesh* each : all().meshes) {
                         each->forked_ = true;
                         each->release();
                       }
                       all().meshes.clear();
                       all().guard.unlock();
                     });
  }

  std::mutex guard;
  std::unordered_set<Mesh*> meshes;
};

Mesh::Mesh(const std::vector<std::pair<int, int>>& sockets) {
  for (const auto& [rank, descriptor] : sockets) {
    const int yes = 1;
    ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
    peers_.emplace(rank, std::make_unique<Peer>(descriptor));
  }
  int ends[2];
  if (::pipe(ends) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int end : ends) {
    ::fcntl(end, F_SETFL, ::fcntl(end, F_GETFL) | O_NONBLOCK);
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  wake_read_ = ends[0], wake_write_ = ends[1];
  const std::lock_guard<std::mutex> lock(Forks::all().guard);
  Forks::all().meshes.insert(this);
  thread_ = std::thread([this] { run(); });
}

Mesh::~Mesh() {
  close();
  if (thread_.joinable()) thread_.detach();  // a fork of a process that was closing it
}

// Close the descriptors: when nothing uses them any more, or in a fork, where nothing may.
void Mesh::release() {
  for (auto& [_, each] : peers_) {
    if (each->socket >= 0) ::close(each->socket);
    each->socket = -1;
  }
  for (int* end : {&wake_read_, &wake_write_}) {
    if (*end >= 0) ::close(*end);
    *end = -1;
  }
}

Mesh::Peer& Mesh::peer(int rank) const {
  if (forked_) throw std::runtime_error("the connections are those of the process that this one was forked from");
  const auto found = peers_.find(rank);
  if (found == peers_.end()) throw std::invalid_argument("there is no connection to rank " + std::to_string(rank));
  return *found->second;
}

void Mesh::wake() {
  const char byte = 0;
  // A full pipe wakes as well.
  [[maybe_unused]] const auto written = ::write(wake_write_, &byte, 1);
}

void Mesh::close() {
  if (closing_.exchange(true)) return;
  if (forked_) {  // a fork has not the thread
    thread_.detach();
    return;
  }
  for (auto& [_, each] : peers_) {
    {
      const std::lock_guard<std::mutex> lock(each->guard);
      if (!each->gone && (each->queue.empty() || each->queue.front().gone == 0)) {
        each->queue.clear();
        each->queue.push_back({{0, kFarewell}, nullptr, 0, false});
        write_some(*each);
      }
    }
    each->leave("this rank has closed its connections");
  }
  wake();
  thread_.join();
  const std::lock_guard<std::mutex> forks(Forks::all().guard);
  Forks::all().meshes.erase(this);
  for (auto& [_, each] : peers_) {
    const std::lock_guard<std::mutex> lock(each->guard);
    each->wire_bytes = wire_bytes_of(each->socket);
  }
  release();
}

std::uint64_t Mesh::send(int rank, std::uint64_t tag, const std::uint8_t* data, std::size_t bytes) {
  Peer& to = peer(rank);
  const std::lock_guard<std::mutex> lock(to.guard);
  if (to.gone || reported_) return ++to.queued;  // whoever waits for that rank learns of it
  to.queue.push_back({{tag, bytes}, data, bytes, true});
  to.queued += 1;
  // What the socket takes at once needs no other thread.
  if (to.queue.size() == 1 && !write_some(to) && !to.queue.empty() && !to.wants_to_write.exchange(true)) wake();
  return to.queued;
}

std::uint64_t Mesh::sent(int rank) const {
  if (forked_) return ~std::uint64_t{0};
  const Peer& to = peer(rank);
  const std::lock_guard<std::mutex> lock(to.guard);
  return to.gone ? ~std::uint64_t{0} : to.sent;
}

// Write what the socket takes, with the guard held; true when all is gone. An error shows when reading.
bool Mesh::write_some(Peer& to) {
  while (!to.queue.empty()) {
    Outgoing& next = to.queue.front();
    const std::size_t total = sizeof(Header) + next.bytes;
    iovec parts[2];
    int count = 0;
    std::size_t skip = next.gone;
    if (skip < sizeof(Header)) {
      parts[count++] = {reinterpret_cast<char*>(&next.header) + skip, sizeof(Header) - skip};
      skip = 0;
    } else {
      skip -= sizeof(Header);
    }
    if (next.bytes > skip) parts[count++] = {const_cast<std::uint8_t*>(next.data) + skip, next.bytes - skip};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
    const ssize_t written = ::sendmsg(to.socket, &message, kSendFlags);
    if (written < 0) return false;
    next.gone += std::size_t(written);
    to.taken = Clock::now();
    if (next.gone < total) return false;
    to.sent += next.message;
    to.queue.pop_front();
  }
  return true;
}

// Read what has come; false when the connection is at its end.
bool Mesh::read_some(Peer& from) {
  const auto leave = [&](const std::string& why) {
    if (!from.farewell && !from.report) disturbed_ = true;  // before any waiting ends; only this thread writes the two
    from.leave(why);
    return false;
  };
  for (;;) {
    std::uint8_t* into;
    std::size_t wanted;
    if (from.arrived < sizeof(Header)) {
      into = reinterpret_cast<std::uint8_t*>(&from.header) + from.arrived;
      wanted = sizeof(Header) - from.arrived;
    } else {
      const std::size_t have = from.arrived - sizeof(Header);
      into = from.arriving.data.get() + have;
      wanted = from.arriving.bytes - have;
    }
    const ssize_t got = wanted ? ::recv(from.socket, into, wanted, MSG_DONTWAIT) : 0;
    if (got < 0) {
      if (would_block(errno)) return true;
      return leave(std::generic_category().message(errno));
    }
    if (wanted && got == 0) return leave("it closed the connection");
    from.arrived += std::size_t(got);
    const bool notice = from.arrived >= sizeof(Header) && from.header.bytes >= kBeat && from.header.bytes <= kReport;
    if (from.arrived == sizeof(Header) && !from.arriving.data) {
      const std::uint64_t bytes = notice ? from.header.tag : from.header.bytes;
      if (bytes > (notice ? kMostReport : kMostBytes)) return leave("it sent something else than a message");
      from.arriving.bytes = std::size_t(bytes);
      const std::size_t room = (from.arriving.bytes / kAlignment + 1) * kAlignment;
      from.arriving.data.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, room)));
      if (!from.arriving.data) return leave("there is no memory for its message");
    }
    const bool whole = from.arriving.data && from.arrived == sizeof(Header) + from.arriving.bytes;
    from.ask_for(whole || !from.arriving.data ? 0 : sizeof(Header) + from.arriving.bytes - from.arrived);
    bool reports = false;
    {
      const std::lock_guard<std::mutex> lock(from.guard);
      from.alive = Clock::now();
      if (!notice) from.heard = from.alive;
      if (whole) {
        if (!notice) {
          from.mail[from.header.tag].push_back(std::move(from.arriving));
          from.changed.notify_all();
        } else if (from.header.bytes == kFarewell) {
          from.farewell = true;
        } else if (from.header.bytes == kReport) {
          from.report.emplace(reinterpret_cast<const char*>(from.arriving.data.get()), from.arriving.bytes);
          reports = true;
        }
        from.arriving = Message{};
        from.arrived = 0;
      } else if (std::size_t(got) < wanted) {
        return true;  // the rest is still on its way
      }
    }
    if (reports) tell_all();
  }
}

// End all waiting: a rank has reported.
void Mesh::tell_all() {
  disturbed_ = reported_ = true;
  for (auto& [_, each] : peers_) {
    const std::lock_guard<std::mutex> lock(each->guard);
    each->changed.notify_all();
  }
}

void Mesh::report(std::string text) {
  if (forked_) return;
  {
    const std::lock_guard<std::mutex> lock(reporting_);
    if (!report_.empty()) return;
    report_ = std::move(text);
    if (report_.empty() || report_.size() > kMostReport) throw std::invalid_argument("a report has 1 byte to 1 MiB");
  }
  for (auto& [_, each] : peers_) {
    const std::lock_guard<std::mutex> lock(each->guard);
    if (each->gone) continue;
    while (each->queue.size() > 1) each->queue.pop_back();
    if (!each->queue.empty() && each->queue.front().gone == 0) each->queue.clear();
    each->queue.push_back({{report_.size(), kReport}, reinterpret_cast<const std::uint8_t*>(report_.data()),
                           report_.size(), false});
    if (!write_some(*each) && !each->wants_to_write.exchange(true)) wake();
  }
  tell_all();
}

std::optional<std::string> Mesh::report_of(int rank) const {
  const Peer& whose = peer(rank);
  const std::lock_guard<std::mutex> lock(whose.guard);
  return whose.report;
}

bool Mesh::gone(int rank) const {
  const Peer& which = peer(rank);
  const std::lock_guard<std::mutex> lock(which.guard);
  return which.gone;
}

bool Mesh::reported() const { return reported_; }

bool Mesh::disturbed() const { return disturbed_; }

double Mesh::silence(int rank) const {
  const Peer& of = peer(rank);
  const std::lock_guard<std::mutex> lock(of.guard);
  return std::max(0.0, since(of.alive).count());
}

std::int64_t Mesh::wire_bytes() const {
  if (forked_) return -1;
  std::int64_t total = 0;
  for (const auto& [_, each] : peers_) {
    const std::lock_guard<std::mutex> lock(each->guard);
    const auto bytes = each->socket >= 0 ? wire_bytes_of(each->socket) : each->wire_bytes;
    if (bytes < 0) return -1;
    total += bytes;
  }
  return total;
}

// Say to each rank that has got nothing for a while that this process runs.
void Mesh::beat() {
  for (auto& [_, each] : peers_) {
    const std::lock_guard<std::mutex> lock(each->guard);
    if (each->gone || !each->queue.empty() || since(each->taken) < kBeatTime / 2) continue;
    each->queue.push_back({{0, kBeat}, nullptr, 0, false});
    if (!write_some(*each)) each->wants_to_write = true;
  }
}

void Mesh::run() {
  std::vector<pollfd> waiting{{wake_read_, POLLIN, 0}};
  std::vector<Peer*> order;
  for (auto& [_, each] : peers_) {
    waiting.push_back({each->socket, POLLIN, 0});
    order.push_back(each.get());
  }
  auto looked = Clock::now(), beaten = looked;
  for (;;) {
    bool portions = false;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (waiting[i + 1].fd < 0) continue;
      waiting[i + 1].events = short(POLLIN | (order[i]->wants_to_write ? POLLOUT : 0));
      portions |= order[i]->portion > 1;
    }
    const auto patience = portions ? kPortionTime : kBeatTime;
    if (::poll(waiting.data(), nfds_t(waiting.size()), int(patience.count())) < 0 && errno != EINTR) return;
    if (closing_) return;
    const auto now = Clock::now();
    const bool look_at_all = portions && now >= looked + kPortionTime;
    if (look_at_all) looked = now;
    if (now >= beaten + kBeatTime) {
      beaten = now;
      beat();
    }
    if (waiting[0].revents) {
      char bytes[64];
      while (::read(wake_read_, bytes, sizeof bytes) > 0) {
      }
    }
    for (std::size_t i = 0; i < order.size(); ++i) {
      Peer& each = *order[i];
      const short seen = waiting[i + 1].fd < 0 ? short(0) : waiting[i + 1].revents;
      if (seen & POLLOUT) {
        const std::lock_guard<std::mutex> lock(each.guard);
        if (write_some(each)) each.wants_to_write = false;
        each.changed.notify_all();
      }
      const bool look = look_at_all && waiting[i + 1].fd >= 0 && each.portion > 1;
      if ((look || (seen & (POLLIN | POLLHUP | POLLERR))) && !read_some(each)) waiting[i + 1].fd = -1;
    }
  }
}

// Until `ready`, with the guard held; `latest` is when the rank last gave a sign of life.
template <class Peer, class Ready>
static Mesh::Outcome wait(Peer& peer, const Clock::time_point& latest, const std::atomic<bool>& reported,
                          double patience_s, const Mesh::Interrupt& interrupt, Ready&& ready) {
  const auto patience =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(patience_s, kLongest)));
  const auto begin = Clock::now();
  auto looked = begin;
  std::unique_lock<std::mutex> lock(peer.guard);
  while (!ready()) {
    if (peer.gone && !peer.report) return Mesh::Outcome::gone;
    if (reported) return Mesh::Outcome::reported;
    const auto now = Clock::now(), silent = std::max(begin, latest) + patience;
    if (now >= silent) return Mesh::Outcome::silent;
    if (now >= looked + kSlice) {
      looked = now;
      lock.unlock();
      interrupt();
      lock.lock();
      continue;
    }
    peer.changed.wait_until(lock, std::min(silent, looked + kSlice));
  }
  return Mesh::Outcome::done;
}

Mesh::Outcome Mesh::receive(int rank, std::uint64_t tag, double patience_s, const Interrupt& interrupt,
                            Message& message) {
  Peer& from = peer(rank);
  return wait(from, from.heard, reported_, patience_s, interrupt, [&] {
    const auto found = from.mail.find(tag);
    if (found == from.mail.end()) return false;
    message = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) from.mail.erase(found);
    return true;
  });
}

Mesh::Outcome Mesh::flush(int rank, std::uint64_t count, double patience_s, const Interrupt& interrupt) {
  Peer& to = peer(rank);
  return wait(to, to.taken, reported_, patience_s, interrupt, [&] { return to.sent >= count; });
}

std::string Mesh::why_gone(int rank) const {
  const Peer& whom = peer(rank);
  const std::lock_guard<std::mutex> lock(whom.guard);
  return whom.why;
}

}  // namespace gradwire
