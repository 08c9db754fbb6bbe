// A reading end of a weight channel.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

struct LeasedSlot {
  int slot;
  int64_t version;
};

enum class PublisherState { open, closed, dead };

// Threads may share a reader: a slot is locked at its first lease and unlocked at its last release.
class Reader {
 public:
  // Throws std::invalid_argument where the file is not the channel of `session`.
  Reader(int64_t pid, int fd, const std::string& session);
  ~Reader() { close(); }

  // The current version; nothing before the first is published. `apply`: also note it as applied.
  std::optional<LeasedSlot> lease(bool apply);
  void release(int slot);
  void applied(int64_t version);

  int64_t version() const { return published().version; }
  // Returns when `version` or a later one is published, the channel ends, or after the time given.
  void wait(int64_t version, double seconds);
  PublisherState publisher() const;
  int64_t publisher_pid() const { return page_->publisher_pid; }
  uint64_t checksum(int slot) const {
    return page_->slot[slot].checksum.load(std::memory_order_relaxed);
  }

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  void require_open() const { file_->fd(); }
  std::string manifest() const;
  int slot_count() const { return static_cast<int>(page_->slots); }
  uint64_t slot_bytes() const { return page_->slot_bytes; }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  char* slot(int index) const { return slots_->data() + index * page_->slot_bytes; }
  // Gives up every lease, too.
  void close();

 private:
  Published published() const {
    return Published::of(page_->published.load(std::memory_order_acquire));
  }
  void check(const std::string& session) const;
  void enter();
  bool lock(int slot);
  void unlock(int slot);
  void tell_publisher();

  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;  // slots are read-only here
  ControlPage* page_;
  ReaderEntry* entry_ = nullptr;
  std::mutex mutex_;
  std::array<int, max_slots> leases_{};
};

}  // namespace fusedrl::channel
