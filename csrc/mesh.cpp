#include "mesh.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
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
  std::size_t gone = 0;  // bytes that have left, of header and data
};

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

void FreeMemory::operator()(std::uint8_t* memory) const { std::free(memory); }

struct Mesh::Peer {
  explicit Peer(int descriptor) : socket(descriptor) {}

  const int socket;
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
  Clock::time_point heard{}, taken{};  // when bytes last came, and went
  bool gone = false;
  std::string why;
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

Mesh::Mesh(const std::vector<std::pair<int, int>>& sockets) {
  for (const auto& [rank, descriptor] : sockets) {
    const int yes = 1;
    ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
    peers_.emplace(rank, std::make_unique<Peer>(descriptor));
  }
  int ends[2];
  if (::pipe(ends) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  for (const int end : ends) ::fcntl(end, F_SETFL, ::fcntl(end, F_GETFL) | O_NONBLOCK);
  wake_read_ = ends[0], wake_write_ = ends[1];
  owner_ = ::getpid();
  thread_ = std::thread([this] { run(); });
}

Mesh::~Mesh() {
  close();
  if (::getpid() != owner_) release();
}

// Once no thread uses the descriptors: their numbers may soon be those of other files.
void Mesh::release() {
  for (auto& [_, each] : peers_) ::close(each->socket);
  ::close(wake_read_);
  ::close(wake_write_);
}

Mesh::Peer& Mesh::peer(int rank) const {
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
  if (::getpid() != owner_) {  // a fork has the sockets too, but not the thread: they are not its to end
    thread_.detach();
    return;
  }
  for (auto& [_, each] : peers_) each->leave("this rank has closed its connections");
  wake();
  thread_.join();
  release();  // from now on every peer is gone, so that nothing is sent or read
}

std::uint64_t Mesh::send(int rank, std::uint64_t tag, const std::uint8_t* data, std::size_t bytes) {
  Peer& to = peer(rank);
  const std::lock_guard<std::mutex> lock(to.guard);
  if (to.gone) return ++to.queued;  // whoever waits for that rank learns of it
  to.queue.push_back({{tag, bytes}, data});
  to.queued += 1;
  // What the socket takes at once needs no other thread.
  if (to.queue.size() == 1 && !write_some(to) && !to.queue.empty() && !to.wants_to_write.exchange(true)) wake();
  return to.queued;
}

std::uint64_t Mesh::sent(int rank) const {
  const Peer& to = peer(rank);
  const std::lock_guard<std::mutex> lock(to.guard);
  return to.gone ? ~std::uint64_t{0} : to.sent;
}

// Write what the socket takes, with the guard held; true when all is gone. An error shows when reading.
bool Mesh::write_some(Peer& to) {
  while (!to.queue.empty()) {
    Outgoing& next = to.queue.front();
    const std::size_t total = sizeof(Header) + next.header.bytes;
    iovec parts[2];
    int count = 0;
    std::size_t skip = next.gone;
    if (skip < sizeof(Header)) {
      parts[count++] = {reinterpret_cast<char*>(&next.header) + skip, sizeof(Header) - skip};
      skip = 0;
    } else {
      skip -= sizeof(Header);
    }
    if (next.header.bytes > skip) parts[count++] = {const_cast<std::uint8_t*>(next.data) + skip, next.header.bytes - skip};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
    const ssize_t written = ::sendmsg(to.socket, &message, kSendFlags);
    if (written < 0) return false;
    next.gone += std::size_t(written);
    to.taken = Clock::now();
    if (next.gone < total) return false;
    to.queue.pop_front();
    to.sent += 1;
  }
  return true;
}

// Read what has come; false when the connection is at its end.
bool Mesh::read_some(Peer& from) {
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
      from.leave(std::generic_category().message(errno));
      return false;
    }
    if (wanted && got == 0) {
      from.leave("it closed the connection");
      return false;
    }
    from.arrived += std::size_t(got);
    if (from.arrived == sizeof(Header) && !from.arriving.data) {
      if (from.header.bytes > kMostBytes) {
        from.leave("it sent something else than a message");
        return false;
      }
      from.arriving.bytes = std::size_t(from.header.bytes);
      const std::size_t room = (from.arriving.bytes / kAlignment + 1) * kAlignment;
      from.arriving.data.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, room)));
      if (!from.arriving.data) {
        from.leave("there is no memory for its message");
        return false;
      }
    }
    const bool whole = from.arriving.data && from.arrived == sizeof(Header) + from.arriving.bytes;
    from.ask_for(whole || !from.arriving.data ? 0 : sizeof(Header) + from.arriving.bytes - from.arrived);
    const std::lock_guard<std::mutex> lock(from.guard);
    from.heard = Clock::now();
    if (whole) {
      from.mail[from.header.tag].push_back(std::move(from.arriving));
      from.arriving = Message{};
      from.arrived = 0;
      from.changed.notify_all();
    } else if (std::size_t(got) < wanted) {
      return true;  // the rest is still on its way
    }
  }
}

void Mesh::run() {
  std::vector<pollfd> waiting{{wake_read_, POLLIN, 0}};
  std::vector<Peer*> order;
  for (auto& [_, each] : peers_) {
    waiting.push_back({each->socket, POLLIN, 0});
    order.push_back(each.get());
  }
  auto looked = Clock::now();
  for (;;) {
    bool portions = false;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (waiting[i + 1].fd < 0) continue;
      waiting[i + 1].events = short(POLLIN | (order[i]->wants_to_write ? POLLOUT : 0));
      portions |= order[i]->portion > 1;
    }
    const int patience = portions ? int(kPortionTime.count()) : -1;
    if (::poll(waiting.data(), nfds_t(waiting.size()), patience) < 0 && errno != EINTR) return;
    if (closing_) return;
    const bool look_at_all = portions && Clock::now() >= looked + kPortionTime;
    if (look_at_all) looked = Clock::now();
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
static Mesh::Outcome wait(Peer& peer, const Clock::time_point& latest, double patience_s,
                          const Mesh::Interrupt& interrupt, Ready&& ready) {
  const auto patience =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(patience_s, kLongest)));
  const auto begin = Clock::now();
  auto looked = begin;
  std::unique_lock<std::mutex> lock(peer.guard);
  while (!ready()) {
    if (peer.gone) return Mesh::Outcome::gone;
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
  return wait(from, from.heard, patience_s, interrupt, [&] {
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
  return wait(to, to.taken, patience_s, interrupt, [&] { return to.sent >= count; });
}

std::string Mesh::why_gone(int rank) const {
  const Peer& whom = peer(rank);
  const std::lock_guard<std::mutex> lock(whom.guard);
  return whom.why;
}

}  // namespace gradwire
