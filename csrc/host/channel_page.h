// What the processes of a weight channel share: the control page at the start of a memory file.
//
// begin    lock a slot that is not published and that nobody leases; mark it WRITING
// (copy)   the publisher writes the weights into the slot
// commit   mark it READY under its version; unlock; publish (version, slot) in one word; wake
// waiters lease    read the published word; lock its slot shared; keep it if it is READY under that
// version release  unlock; tell the publisher
//
// Locks are the kernel's, on open file descriptions: a process that dies lets go of its own. So no
// state here has to be repaired: a slot that stays WRITING is locked by nobody and is taken again.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string_view>

namespace fusedrl::channel {

constexpr char magic[8] = {'f', 'u', 's', 'e', 'd', 'r', 'l', 1};
constexpr int max_slots = 64;  // a reader's leases are one word
constexpr int64_t no_version = -1;
constexpr int64_t max_version = (int64_t{1} << 55) - 1;

enum class SlotState : uint32_t { empty, writing, ready };

struct alignas(64) Slot {
  std::atomic<SlotState> state;
  std::atomic<int64_t> version;
  std::atomic<uint64_t> checksum;
  std::atomic<uint32_t> releases;  // orders what readers read before what is written next
};

// Valid while its lock is held; a pid without a lock is of a reader that died.
struct alignas(64) ReaderEntry {
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> leased;  // a bit a slot
  std::atomic<int64_t> applied;
};

struct ControlPage {
  char magic[8];
  char session[32];
  int64_t publisher_pid;
  uint64_t file_bytes, manifest_offset, manifest_bytes, slots_offset, slot_bytes;
  uint32_t slots, max_readers;

  alignas(64) std::atomic<uint64_t> published;  // version << 8 | slot + 1; 0: nothing yet
  std::atomic<uint32_t> sequence;               // futex: a commit, or the end of the channel
  std::atomic<uint32_t> closed;
  alignas(64) std::atomic<uint32_t> progress;  // futex: a release, or a version applied
  std::atomic<uint32_t> publisher_waits;

  Slot slot[max_slots];
  ReaderEntry reader[];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

struct Published {
  int64_t version = no_version;
  int slot = -1;

  static Published of(uint64_t word) {
    if (word == 0) return {};
    return {static_cast<int64_t>(word >> 8), static_cast<int>(word & 0xff) - 1};
  }
  uint64_t word() const {
    return static_cast<uint64_t>(version) << 8 | static_cast<uint64_t>(slot + 1);
  }
};

// Bytes of the memory file that stand for locks. They lie in the control page, whose content they
// do not touch.
constexpr int64_t alive_lock = 0;  // exclusive, as long as the publisher lives
constexpr int64_t slot_lock = 1;   // + slot: shared by readers, exclusive for the publisher
constexpr int64_t reader_lock = slot_lock + max_slots;  // + entry: exclusive, as long as it lives

// Every point between two effects of the protocol, for tests that end a process there.
enum class Step {
  begin_locked,
  begin_marked,
  commit_marked,
  commit_unlocked,
  commit_published,
  commit_woken,
  open_locked,
  open_registered,
  lease_loaded,
  lease_registered,
  lease_locked,
  lease_validated,
  release_unlocked,
  release_unregistered,
  release_told,
};
constexpr std::string_view step_names[] = {
    "begin_locked",     "begin_marked",         "commit_marked", "commit_unlocked",
    "commit_published", "commit_woken",         "open_locked",   "open_registered",
    "lease_loaded",     "lease_registered",     "lease_locked",  "lease_validated",
    "release_unlocked", "release_unregistered", "release_told",
};

inline std::atomic<int> signal_step{-1};
inline std::atomic<int> signal_number{0};

inline void at(Step step) {
  if (signal_step.load(std::memory_order_relaxed) == static_cast<int>(step))
    std::raise(signal_number.load(std::memory_order_relaxed));
}

}  // namespace fusedrl::channel
