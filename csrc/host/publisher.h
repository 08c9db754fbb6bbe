// The writing end of a weight channel.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

// A reader's pid, whether it lives, the versions that it leases, and the last one it leased.
using ReaderState = std::tuple<int64_t, bool, std::vector<int64_t>, int64_t>;

// One slot is written at a time, and one thread may be in each call. Writing throws
// std::runtime_error once the channel is closed, or in a forked child.
class Publisher {
 public:
  // `file` has the geometry's bytes, all reserved. slot_bytes is 0 if the slots are on a GPU.
  Publisher(std::unique_ptr<MemoryFile> file, const Geometry& geometry, const std::string& session,
            const std::string& manifest);
  ~Publisher() { close(); }

  // Locks a slot that is not leased; none if there is no such slot, or another is being written.
  std::optional<int> try_begin();
  bool writing() const { return begun_.has_value(); }
  void commit(int slot, int64_t version);
  // Gives up the slot that was begun, if one was.
  void abort();

  int64_t version() const { return published_.version; }
  int fd() const { return file_->fd(); }
  bool is_open() const { return file_->is_open(); }
  std::shared_ptr<Mapping> slots() const { return slots_; }
  uint64_t slot_count() const { return geometry_.slots; }
  char* slot(int index) const { return slots_->data() + index * geometry_.slot_bytes; }

  // The open readers, and those that died and were not forgotten since, unless another reader has
  // reused the entry.
  std::vector<ReaderState> readers(bool forget_dead);
  // The value for wait(). Read it before you check the condition that you wait for.
  uint32_t progress();
  // Returns after a release, the end of a write, or `seconds`.
  void wait(uint32_t progress, double seconds);
  // Announces to the readers that no version follows.
  void finish();
  // The memory is freed when the last process unmaps it.
  void close();
  void require_open() const { file_->fd(); }

 private:
  const Geometry geometry_;
  Published published_;
  std::optional<int> begun_;
  std::unique_ptr<MemoryFile> file_;
  std::shared_ptr<Mapping> head_, slots_;
  ControlPage* page_;
};

}  // namespace fusedrl::channel
