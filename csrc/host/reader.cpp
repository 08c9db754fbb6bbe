#include "host/reader.h"

#include <cstring>
#include <stdexcept>

#include "host/futex.h"

namespace fusedrl::channel {

Reader::Reader(int64_t pid, int fd, const std::string& session) {
  file_ = MemoryFile::reopen(pid, fd);
  head_ = std::make_shared<Mapping>(*file_, 0, sizeof(ControlPage), true);
  page_ = reinterpret_cast<ControlPage*>(head_->data());
  check(session);
  const uint64_t slots_offset = page_->slots_offset;
  head_ = std::make_shared<Mapping>(*file_, 0, slots_offset, true);
  page_ = reinterpret_cast<ControlPage*>(head_->data());
  if (page_->slot_bytes > 0)
    slots_ =
        std::make_shared<Mapping>(*file_, slots_offset, page_->slots * page_->slot_bytes, false);
  enter();
}

void Reader::check(const std::string& session) const {
  const uint64_t bytes = file_->bytes();
  if (bytes < sizeof(ControlPage) || std::memcmp(page_->magic, magic, sizeof(magic)) != 0 ||
      session.size() != sizeof(page_->session) ||
      std::memcmp(page_->session, session.data(), session.size()) != 0)
    throw std::invalid_argument("another session");
  const uint64_t table = sizeof(ControlPage) + page_->max_readers * sizeof(ReaderEntry);
  const bool fits = page_->slots >= 1 && page_->slots <= max_slots && page_->file_bytes == bytes &&
                    table <= page_->manifest_offset &&
                    page_->manifest_offset <= page_->slots_offset &&
                    page_->manifest_bytes <= page_->slots_offset - page_->manifest_offset &&
                    page_->slots_offset <= bytes &&
                    page_->slot_bytes == (bytes - page_->slots_offset) / page_->slots;
  if (!fits) throw std::invalid_argument("a damaged control page");
}

void Reader::enter() {
  for (uint32_t i = 0; i < page_->max_readers; ++i) {
    if (!file_->try_lock_exclusive(reader_lock + i)) continue;
    at(Step::open_locked);
    entry_ = &page_->reader[i];
    entry_->leased.store(0, std::memory_order_relaxed);
    entry_->applied.store(no_version, std::memory_order_relaxed);
    entry_->pid.store(getpid(), std::memory_order_release);
    at(Step::open_registered);
    return;
  }
  throw std::overflow_error(std::to_string(page_->max_readers));
}

std::optional<LeasedSlot> Reader::lease(bool apply) {
  std::lock_guard guard(mutex_);
  file_->fd();
  for (;;) {
    const Published current = published();
    if (current.slot < 0) return std::nullopt;
    at(Step::lease_loaded);
    const int slot = current.slot;
    // A failure means that the publisher has moved on since.
    if (leases_[slot] == 0 && !lock(slot)) continue;
    const Slot& entry = page_->slot[slot];
    if (entry.state.load(std::memory_order_acquire) == SlotState::ready &&
        entry.version.load(std::memory_order_relaxed) == current.version) {
      at(Step::lease_validated);
      ++leases_[slot];
      if (apply) applied(current.version);
      return LeasedSlot{slot, current.version};
    }
    if (leases_[slot] == 0) unlock(slot);
  }
}

void Reader::release(int slot) {
  std::lock_guard guard(mutex_);
  if (!file_->is_open() || --leases_[slot] > 0) return;
  unlock(slot);
  tell_publisher();
  at(Step::release_told);
}

// The entry names a slot before it is locked and until after it is unlocked, so that a publisher
// that finds it locked can tell by whom.
bool Reader::lock(int slot) {
  entry_->leased.fetch_or(uint64_t{1} << slot, std::memory_order_release);
  at(Step::lease_registered);
  if (!file_->try_lock_shared(slot_lock + slot)) {
    entry_->leased.fetch_and(~(uint64_t{1} << slot), std::memory_order_release);
    return false;
  }
  at(Step::lease_locked);
  return true;
}

void Reader::unlock(int slot) {
  page_->slot[slot].releases.fetch_add(1, std::memory_order_release);
  file_->unlock(slot_lock + slot);
  at(Step::release_unlocked);
  entry_->leased.fetch_and(~(uint64_t{1} << slot), std::memory_order_release);
  at(Step::release_unregistered);
}

void Reader::applied(int64_t version) {
  if (!file_->is_open() || entry_->applied.load(std::memory_order_relaxed) >= version) return;
  entry_->applied.store(version, std::memory_order_release);
  tell_publisher();
}

void Reader::tell_publisher() {
  page_->progress.fetch_add(1, std::memory_order_seq_cst);
  if (page_->publisher_waits.load(std::memory_order_seq_cst)) futex_wake_all(page_->progress);
}

void Reader::wait(int64_t version, double seconds) {
  const uint32_t sequence = page_->sequence.load(std::memory_order_acquire);
  if (published().version >= version || publisher() != PublisherState::open) return;
  futex_wait(page_->sequence, sequence, seconds);
}

PublisherState Reader::publisher() const {
  if (page_->closed.load(std::memory_order_acquire)) return PublisherState::closed;
  return file_->locked_elsewhere(alive_lock) ? PublisherState::open : PublisherState::dead;
}

std::string Reader::manifest() const {
  return {head_->data() + page_->manifest_offset, page_->manifest_bytes};
}

void Reader::close() {
  std::lock_guard guard(mutex_);
  if (!file_->is_open()) return;  // also in a forked child: the entry is its parent's
  leases_.fill(0);
  entry_->leased = 0;
  entry_->pid = 0;
  file_->close();
  tell_publisher();
}

}  // namespace fusedrl::channel
