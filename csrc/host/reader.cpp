#include "host/reader.h"

#include <cstring>
#include <exception>
#include <stdexcept>

namespace fusedrl::channel {

namespace {

constexpr int tries = 100;

}  // namespace

Reader::Reader(int64_t pid, int fd, const std::string& session) {
  file_ = MemoryFile::reopen(pid, fd);
  read_header(session);
  head_ = std::make_shared<Mapping>(*file_, 0, geometry().slots_offset(), true);
  page_ = reinterpret_cast<ControlPage*>(head_->data());
  manifest_.assign(head_->data() + geometry().manifest_offset(), geometry().manifest_bytes);
  if (geometry().slot_bytes > 0)
    slots_ = std::make_shared<Mapping>(*file_, geometry().slots_offset(),
                                       geometry().slots * geometry().slot_bytes, false);
  enter();
}

void Reader::read_header(const std::string& session) {
  if (file_->bytes() < sizeof(ControlPage)) throw std::invalid_argument("other shared memory");
  const Mapping page(*file_, 0, sizeof(ControlPage), false);
  std::memcpy(&header_, page.data(), sizeof(header_));
  if (std::memcmp(header_.magic, magic, sizeof(magic)) != 0)
    throw std::invalid_argument("memory that no channel of this version of fusedrl begins with");
  if (session.size() != sizeof(header_.session) ||
      std::memcmp(header_.session, session.data(), session.size()) != 0)
    throw std::invalid_argument("another session");
}

void Reader::enter() {
  // Entries of readers that died are taken only if no other is left, as they have deaths to report.
  // The first to be taken are those with a single death.
  for (const auto& suits :
       {+[](Pids pids) { return pids.present == 0; }, +[](Pids pids) { return pids.died == 0; },
        +[](Pids) { return true; }}) {
    for (uint64_t i = 0; i < geometry().max_readers; ++i) {
      ReaderEntry& entry = page_->reader[i];
      if (!suits(Pids::of(entry.pids)) || !file_->try_lock_exclusive(reader_lock + i)) continue;
      at(Step::open_locked);
      entry_ = &entry;
      entry.leased.store(0, std::memory_order_relaxed);
      entry.applied.store(no_version, std::memory_order_relaxed);
      const uint32_t own = static_cast<uint32_t>(getpid());
      uint64_t word = entry.pids;
      for (;;) {
        const Pids before = Pids::of(word);
        const Pids after{before.present != 0 ? before.present : before.died, own};
        if (entry.pids.compare_exchange_weak(word, after.word())) break;
      }
      at(Step::open_registered);
      return;
    }
  }
  throw std::overflow_error(std::to_string(geometry().max_readers));
}

bool Reader::holds(const Published& published) const {
  const Slot& slot = page_->slot[published.slot];
  return slot.state.load(std::memory_order_acquire) == SlotState::ready &&
         slot.version.load(std::memory_order_relaxed) == published.version;
}

void Reader::take(Lease& lease, bool apply) {
  require_open();  // first, as another thread may have held a forked child's mutex at the fork
  std::lock_guard guard(mutex_);
  for (int i = 0; i < tries; ++i) {
    const Published current = published();
    if (current.slot < 0) return;
    at(Step::lease_loaded);
    const int slot = current.slot;
    // If the publisher writes the slot by now, it has published a later version.
    if (leases_[slot] == 0 && !lock(slot)) continue;
    if (holds(current)) {
      at(Step::lease_validated);
      ++leases_[slot];
      lease.slot_ = slot;
      lease.version_ = current.version;
      if (apply) applied(current.version);
      return;
    }
    if (leases_[slot] == 0) unlock(slot);
  }
}

// Reads `other` under the mutex, as another thread may release it.
void Reader::share(Lease& lease, const std::atomic<int>& other) {
  require_open();
  std::lock_guard guard(mutex_);
  const int slot = other;
  if (slot == Lease::none || leases_[slot] == 0) return;
  ++leases_[slot];
  lease.slot_ = slot;
}

void Reader::release(Lease& lease) {
  if (!file_->is_open()) return;
  std::lock_guard guard(mutex_);
  const int slot = lease.slot_.exchange(Lease::none);
  if (slot == Lease::none || !file_->is_open() || --leases_[slot] > 0) return;
  unlock(slot);
  tell_publisher(*page_);
  at(Step::release_told);
}

std::vector<int> Reader::leased() {
  if (!file_->is_open()) return {};
  std::lock_guard guard(mutex_);
  std::vector<int> slots;
  for (int slot = 0; slot < static_cast<int>(max_slots); ++slot)
    if (leases_[slot] > 0) slots.push_back(slot);
  return slots;
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
  tell_publisher(*page_);
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

void Reader::close() {
  end_leases();
  if (!file_->is_open()) return;  // closed, or a forked child, as the entry is its parent's
  std::lock_guard guard(mutex_);
  if (!file_->is_open()) return;
  for (uint64_t slot = 0; slot < max_slots; ++slot)
    if (leases_[slot] > 0) page_->slot[slot].releases.fetch_add(1, std::memory_order_release);
  leases_.fill(0);
  entry_->leased = 0;
  entry_->pids.fetch_and(~uint64_t{UINT32_MAX});  // keeps the pid of a reader that died before
  file_->close();
  tell_publisher(*page_);
}

Lease::Lease(std::shared_ptr<Reader> reader, bool apply) : reader_(std::move(reader)) {
  reader_->take(*this, apply);
}

Lease::Lease(const Lease& other)
    : reader_(other.reader_), version_(other.version_), by_slot_(other.by_slot_) {
  reader_->share(*this, other.slot_);
}

Lease::Lease(std::shared_ptr<Reader> reader, int slot)
    : reader_(std::move(reader)), by_slot_(true) {
  const std::atomic<int> held{slot};
  reader_->share(*this, held);
}

Lease::~Lease() {
  try {
    release();
  } catch (const std::exception&) {
    // The kernel refuses to unlock a file that is open: the slot is free when the reader is closed.
  }
}

}  // namespace fusedrl::channel
