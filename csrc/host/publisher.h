// The writing end of a weight channel.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

struct ReaderState {
  int64_t pid;
  bool alive;
  std::vector<int64_t> leased;  // versions
  int64_t applied;
};

// Assumes one thread at a time in try_begin, commit and abort.
class Publisher {
 public:
  // slot_bytes: 0 where the slots lie elsewhere, on a GPU.
  Publisher(int slots, uint64_t slot_bytes, int max_readers, const std::string& session,
            const std::string& manifest);
  ~Publisher() { close(); }

  std::optional<int> try_begin();
  void commit(int slot, int64_t version, uint64_t checksum);
  void abort(int slot);

  int64_t version() const {
    return Published::of(page_->published.load(std::memory_order_acquire)).version;
  }
  int fd() const { return file_->fd(); }
  // For another process; the caller closes it.
  int share() const { return file_->reopened(); }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  char* slot(int index) const { return slots_->data() + index * page_->slot_bytes; }

  // The readers that are open, and those that died since they were last forgotten.
  std::vector<ReaderState> readers(bool forget_dead);
  // What wait() compares with: read it before looking at what is waited for.
  uint32_t progress();
  // Returns after a release, a version applied, or the time given.
  void wait(uint32_t progress, double seconds);
  // Tells the readers that nothing follows.
  void finish();
  // The memory lives on as long as anyone maps it.
  void close();

 private:
  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;
  ControlPage* page_;
  int last_ = -1;
};

}  // namespace fusedrl::channel
