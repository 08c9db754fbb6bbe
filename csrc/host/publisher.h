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

// A reader's pid, whether it lives, the versions that it leases, and the one that it has applied.
using ReaderState = std::tuple<int64_t, bool, std::vector<int64_t>, int64_t>;

// One slot is written at a time. Assumes one thread at a time in each call. What writes throws
// std::runtime_error once closed, or in a child of the process that made the channel.
class Publisher {
 public:
  // `file`: of the geometry's bytes, all reserved; slot_bytes is 0 where the slots lie elsewhere,
  // on a GPU.
  Publisher(std::unique_ptr<MemoryFile> file, const Geometry& geometry, const std::string& session,
            const std::string& manifest);
  ~Publisher() { close(); }

  // Locks a slot that nobody leases: none if there is no such slot, or if one is written already.
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

  // The readers that are open, and those that died and were not forgotten since, unless another
  // has taken the entry of one.
  std::vector<ReaderState> readers(bool forget_dead);
  // The value that wait() compares with. Read it before you check the condition that you wait for.
  uint32_t progress();
  // Returns after a release, a write's end, or after `seconds`.
  void wait(uint32_t progress, double seconds);
  // Tells the readers that no version follows.
  void finish();
  // The memory lives on as long as anyone maps it.
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
