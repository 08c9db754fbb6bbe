// A reading end of a weight channel.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

enum class PublisherState { open, closed, dead };

// Threads may share a reader: a slot is locked at its first lease and unlocked at its last release.
class Reader {
 public:
  // Throws std::invalid_argument if the file is not the channel of `session`, and
  // std::overflow_error if it has its largest number of readers already.
  Reader(int64_t pid, int fd, const std::string& session);
  ~Reader() { close(); }

  void applied(int64_t version);

  int64_t version() const { return published().version; }
  // Returns when `version` or a later one is published, the channel ends, or after the time given.
  void wait(int64_t version, double seconds);
  PublisherState publisher() const;
  int64_t publisher_pid() const { return header_.publisher_pid; }

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  void require_open() const { file_->fd(); }
  bool is_open() const { return file_->is_open(); }
  const std::string& manifest() const { return manifest_; }
  const Geometry& geometry() const { return header_.geometry; }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  char* slot(int index) const { return slots_->data() + index * geometry().slot_bytes; }
  // The slots that are leased.
  std::vector<int> leased();
  // From here on no lease is held, but for those that were taken by their slot.
  void end_leases() { ended_ = true; }
  // Also releases every lease.
  void close();

 private:
  friend class Lease;
  void take(class Lease& lease, bool apply);
  void share(Lease& lease, const std::atomic<int>& slot);
  void release(Lease& lease);
  Published published() const {
    return Published::of(page_->published.load(std::memory_order_acquire));
  }
  bool holds(const Published& published) const;
  void read_header(const std::string& session);
  void enter();
  bool lock(int slot);
  void unlock(int slot);

  Header header_;
  std::string manifest_;
  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;  // slots are read-only here
  ControlPage* page_;
  ReaderEntry* entry_ = nullptr;
  std::atomic<bool> ended_{false};
  std::mutex mutex_;
  std::array<int, max_slots> leases_{};
};

// One lease of a version. It owns its slot from the moment in which it is taken, and gives it back
// once, however many threads release it, and at the latest when it is destroyed.
class Lease {
 public:
  // Takes the current version. Nothing is held if none is published yet, or if the publisher has
  // moved on at each attempt. With `apply`, the version is also noted as applied.
  Lease(std::shared_ptr<Reader> reader, bool apply);
  // Takes what another lease has. Nothing is held if that one is released.
  Lease(const Lease& other);
  // Takes a slot that the reader leases already, beyond the end of the reader's other leases.
  Lease(std::shared_ptr<Reader> reader, int slot);
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  void release() { reader_->release(*this); }
  // Leaves the slot taken until the reader is closed.
  void forget() { slot_ = none; }
  bool held() const { return slot_ != none && (by_slot_ || !reader_->ended_); }
  int slot() const { return slot_; }
  int64_t version() const { return version_; }
  const Reader& reader() const { return *reader_; }

 private:
  friend class Reader;
  static constexpr int none = -1;
  std::shared_ptr<Reader> reader_;
  std::atomic<int> slot_{none};
  int64_t version_ = no_version;
  bool by_slot_ = false;
};

}  // namespace fusedrl::channel
