// Messages between ranks over connected sockets, on a thread of its own. Whoever sends and receives never waits for the
// others' order: messages carry tags and are kept until they are asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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
  enum class Outcome { done, silent, gone, reported };
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

  // Send every rank a report, ahead of the messages that have not begun to leave, which are dropped. From here on, and
  // once a report of another rank has come, all waiting ends as `reported`, unless its message is there already. The
  // first report is the only one.
  void report(std::string text);
  // The report of a rank, once it has come.
  std::optional<std::string> report_of(int rank) const;
  bool gone(int rank) const;
  // Whether a rank has reported, this one included; or one has at least gone without a farewell.
  bool reported() const;
  bool disturbed() const;
  // Seconds since bytes last came from that rank. While it has nothing to send, its thread sends a beat every second.
  double silence(int rank) const;

  // Bytes that have left for all ranks, acknowledgements, repetitions and the headers down to Ethernet's included, as
  // the kernel counts them; negative where it does not.
  std::int64_t wire_bytes() const;

  // Ends all connections and the thread, and closes the descriptors. Waiting for any rank then says it is gone.
  void close();

 private:
  struct Peer;
  friend struct Forks;
  Peer& peer(int rank) const;
  void run();
  void wake();
  void release();
  void tell_all();
  void beat();
  bool read_some(Peer& peer);
  static bool write_some(Peer& peer);
  std::unordered_map<int, std::unique_ptr<Peer>> peers_;
  int wake_read_ = -1, wake_write_ = -1;
  std::atomic<bool> closing_{false}, reported_{false}, disturbed_{false};
  bool forked_ = false;  // this process is a fork of the one that has the thread and the connections
  std::string report_;
  std::mutex reporting_;
  std::thread thread_;
};

}  // namespace gradwire
