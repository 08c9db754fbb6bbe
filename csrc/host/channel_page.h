// The control page of a weight channel, at the start of the memory file that its processes share.
//
//  - begin: lock a slot that is neither published nor leased, and mark it WRITING.
//  - copy: the publisher writes the weights into the slot.
//  - commit: mark it READY under its version, unlock it, publish (version, slot) in one word, and
//    wake the waiting readers.
//  - lease: read the published word, lock its slot shared, and keep it if it is READY under that
//    version.
//  - release: unlock the slot, and wake the publisher if it waits.
//
// The kernel locks open file descriptions, and unlocks those of a process that dies. No state here
// needs repair: a slot that is left WRITING is unlocked, so that the next write can use it.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>
#include <string_view>

#include "host/futex.h"

namespace fusedrl::channel {

// The last byte changes with this page and with the format of the manifest, so that a reader of
// another version of the package is refused.
constexpr char magic[8] = {'f', 'u', 's', 'e', 'd', 'r', 'l', 5};
constexpr uint64_t max_slots = 64;  // a reader's leases are bits of one word
constexpr int64_t no_version = -1;

enum class SlotState : uint32_t { empty, writing, ready };

constexpr uint64_t page_bytes = 4096;
constexpr uint64_t rounded(uint64_t bytes) {
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

struct alignas(64) Slot {
  std::atomic<SlotState> state;
  std::atomic<int64_t> version;
  std::atomic<uint32_t> releases;  // orders a reader's loads before the next write
};

struct alignas(64) ReaderEntry {
  std::atomic<uint32_t> pid;     // 0: unused; without a lock, the reader died
  std::atomic<uint64_t> leased;  // one bit per slot
  std::atomic<int64_t> applied;
};

// The offsets of all parts of the memory file follow from these sizes.
struct Geometry {
  uint64_t slots, slot_bytes, max_readers, manifest_bytes;

  uint64_t manifest_offset() const;
  uint64_t slots_offset() const;
  uint64_t file_bytes() const { return slots_offset() + slots * slot_bytes; }
};

// Constant once readers can open the channel.
struct Header {
  char magic[8];
  char session[32];
  int64_t publisher_pid;
  Geometry geometry;
};

struct ControlPage {
  Header header;

  alignas(64) std::atomic<uint64_t> published;  // version << 8 | slot + 1; 0: nothing yet
  std::atomic<uint32_t> sequence;               // futex: a commit, or the end of the channel
  std::atomic<uint32_t> closed;
  alignas(64) std::atomic<uint32_t> progress;  // futex: a release, or the end of a write
  std::atomic<uint32_t> publisher_waits;

  Slot slot[max_slots];
  ReaderEntry reader[];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline void tell_publisher(ControlPage& page) {
  page.progress.fetch_add(1, std::memory_order_seq_cst);
  if (page.publisher_waits.load(std::memory_order_seq_cst)) futex_wake_all(page.progress);
}

inline uint64_t Geometry::manifest_offset() const {
  return rounded(sizeof(ControlPage) + max_readers * sizeof(ReaderEntry));
}
inline uint64_t Geometry::slots_offset() const {
  return rounded(manifest_offset() + manifest_bytes);
}

struct Published {
  int64_t version = no_version;
  int slot = -1;

  static Published of(uint64_t word) {
    if (word == 0) return {};
    return {static_cast<int64_t>(word >> 8), static_cast<int>(word & 0xff) - 1};
  }
  uint64_t word() const {
    return slot < 0 ? 0 : static_cast<uint64_t>(version) << 8 | static_cast<uint64_t>(slot + 1);
  }
};

// Byte ranges of the memory file that serve as locks. They lie in the control page, but locking
// does not access its content.
constexpr int64_t alive_lock = 0;  // exclusive while the publisher lives
constexpr int64_t slot_lock = 1;   // + slot: shared by readers, exclusive for the publisher
constexpr int64_t reader_lock = slot_lock + max_slots;  // + entry: exclusive while the reader lives

// All points between two effects of the protocol, where tests end a process.
constexpr std::string_view steps[] = {
    "begin_locked",     "begin_marked",         "commit_marked", "commit_unlocked",
    "commit_published", "commit_woken",         "open_locked",   "open_registered",
    "lease_loaded",     "lease_registered",     "lease_locked",  "lease_validated",
    "release_unlocked", "release_unregistered", "release_told",
};

inline std::string signal_step;
inline std::atomic<int> signal_number{0};

inline void at(std::string_view step) {
  const int number = signal_number.load(std::memory_order_acquire);
  if (number != 0 && step == signal_step) std::raise(number);
}

}  // namespace fusedrl::channel
