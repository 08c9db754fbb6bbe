// A reading end of a weight channel.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "host/channel_page.h"
#include "host/memory_file.h"
#include "host/write_report.h"

namespace fusedrl::channel {

struct LeasedSlot {
  int slot;
  int64_t version;
};

enum class PublisherState { open, closed, dead };

// Threads may share a reader: a slot is locked at its first lease and unlocked at its last release.
class Reader {
 public:
  // Throws std::invalid_argument if the file is not the channel of `session`, Damaged if its
  // control page is not as the publisher wrote it, and std::overflow_error if it has its largest
  // number of readers already.
  Reader(int64_t pid, int fd, const std::string& session);
  ~Reader() { close(); }

  // Leases the current version. Returns nothing if none is published yet, or if the publisher has
  // moved on at each attempt. With `apply`, the version is also noted as applied. Throws Damaged.
  std::optional<LeasedSlot> lease(bool apply);
  void release(int slot);
  void applied(int64_t version);

  // Throws Damaged.
  int64_t version() { return published().version; }
  // Returns when `version` or a later one is published, the channel ends, or after the time given.
  void wait(int64_t version, double seconds);
  PublisherState publisher() const;
  int64_t publisher_pid() const { return header_.publisher_pid; }
  uint64_t checksum(int slot) const {
    return page_->slot[slot].checksum.load(std::memory_order_relaxed);
  }

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  void require_open() const { file_->fd(); }
  const std::string& manifest() const { return manifest_; }
  const Geometry& geometry() const { return header_.geometry; }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  char* slot(int index) const { return slots_->data() + index * geometry().slot_bytes; }
  // If a write to a slot ends this process, the report names the entry among these.
  void report_writes(std::vector<WriteReport::Entry> entries);
  // Also releases every lease.
  void close();

 private:
  Published published();
  bool holds(const Published& published) const;
  void read_header(const std::string& session);
  void read_manifest();
  void enter();
  bool lock(int slot);
  void unlock(int slot);
  void tell_publisher();

  // Copies of what was checked, as the page may change afterwards.
  Header header_;
  std::string manifest_;
  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;  // slots are read-only here
  ControlPage* page_;
  ReaderEntry* entry_ = nullptr;
  std::atomic<int64_t> seen_{no_version};  // the newest version that was published so far
  std::mutex mutex_;
  std::array<int, max_slots> leases_{};
};

}  // namespace fusedrl::channel
