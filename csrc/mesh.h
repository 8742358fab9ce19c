// Messages between ranks over connected sockets, on a thread of its own. Whoever sends and receives never waits for the
// others' order: messages carry tags and are kept until they are asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gradwire {

struct FreeMemory {
  void operator()(std::uint8_t* memory) const;
};

struct Message {
  std::unique_ptr<std::uint8_t[], FreeMemory> data;
  std::size_t bytes = 0;
};

class Mesh {
 public:
  enum class Outcome { done, silent, gone };
  using Interrupt = std::function<void()>;

  // Takes the sockets, each connected to a rank.
  explicit Mesh(const std::vector<std::pair<int, int>>& sockets);
  ~Mesh();
  Mesh(const Mesh&) = delete;

  // What it sends must stay until `sent` says so. Returns how many messages to that rank this makes.
  std::uint64_t send(int rank, std::uint64_t tag, const std::uint8_t* data, std::size_t bytes);
  // How many messages to that rank have left.
  std::uint64_t sent(int rank) const;

  // Wait for the next message with a tag, or until so many have left; `silent` when for `patience_s` of waiting nothing
  // came from that rank, or went to it. `interrupt` is called now and then, and may throw.
  Outcome receive(int rank, std::uint64_t tag, double patience_s, const Interrupt& interrupt, Message& message);
  Outcome flush(int rank, std::uint64_t count, double patience_s, const Interrupt& interrupt);

  std::string why_gone(int rank) const;

  // Ends all connections and the thread, and closes the descriptors. Waiting for any rank then says it is gone.
  void close();

 private:
  struct Peer;
  Peer& peer(int rank) const;
  void run();
  void wake();
  void release();
  static bool write_some(Peer& peer);
  static bool read_some(Peer& peer);
  std::unordered_map<int, std::unique_ptr<Peer>> peers_;
  int wake_read_ = -1, wake_write_ = -1;
  std::atomic<bool> closing_{false};
  int owner_ = 0;  // the process that has the thread
  std::thread thread_;
};

}  // namespace gradwire
