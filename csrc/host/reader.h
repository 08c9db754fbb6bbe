// A reading end of a weight channel.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

// Threads may share a reader: a slot is locked at its first lease and unlocked at its last release.
class Reader {
 public:
  // Throws std::invalid_argument if the file is not the channel of `session`, and
  // std::runtime_error if the channel has its largest number of readers.
  Reader(int64_t pid, int fd, const std::string& session);
  ~Reader() { close(); }

  int64_t version() const { return published().version; }
  // Returns when `version` or a later one is published, when the channel ends, or after `seconds`.
  void wait(int64_t version, double seconds);
  // How the publisher has ended, as text; null while it has not.
  const char* ended() const;
  int64_t publisher_pid() const { return header_.publisher_pid; }

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  void require_open() const { file_->fd(); }
  bool is_open() const { return file_->is_open(); }
  const std::string& manifest() const { return manifest_; }
  const Geometry& geometry() const { return header_.geometry; }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  char* slot(int index) const { return slots_->data() + index * geometry().slot_bytes; }
  bool leases() const { return is_open() && entry_->leased != 0; }
  // Also releases every lease.
  void close();

 private:
  friend class Lease;
  void take(class Lease& lease);
  void share(Lease& lease, const Lease& other);
  void release(Lease& lease);
  Published published() const {
    return Published::of(page_->published.load(std::memory_order_acquire));
  }
  void enter();
  bool lock(int slot);
  void unlock(int slot);

  Header header_;
  std::string manifest_;
  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;  // slots are read-only here
  ControlPage* page_;
  ReaderEntry* entry_ = nullptr;
  std::mutex mutex_;
  std::array<int, max_slots> leases_{};
};

// A lease of a version. It owns its slot from the start, and releases it once, by whichever thread
// is first, at the latest when it is destroyed. In a forked child it owns nothing.
class Lease {
 public:
  // Leases the newest version, and records it as applied. Holds nothing if none is published yet,
  // or if the publisher has just published another.
  explicit Lease(std::shared_ptr<Reader> reader) : reader_(std::move(reader)) {
    reader_->take(*this);
  }
  // Shares the slot of another lease. Holds nothing if that one is released.
  Lease(const Lease& other);
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  void release();
  bool held() const { return slot_ != none && reader_->is_open(); }
  int slot() const { return slot_; }
  int64_t version() const { return version_; }

  // Called once, when the lease is released, with the address of another lease of its slot. The
  // callee deletes that one, for instance when a GPU has finished with the slot.
  std::function<void(uintptr_t)> before_release;

 private:
  friend class Reader;
  static constexpr int none = -1;
  std::shared_ptr<Reader> reader_;
  std::atomic<int> slot_{none};
  int64_t version_ = no_version;
};

}  // namespace fusedrl::channel
