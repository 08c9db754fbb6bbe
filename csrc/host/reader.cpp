#include "host/reader.h"

#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

namespace fusedrl::channel {

Reader::Reader(int64_t pid, int fd, const std::string& session)
    : file_(MemoryFile::reopen(pid, fd)) {
  if (file_->bytes() < sizeof(ControlPage)) throw std::invalid_argument("other shared memory");
  const Mapping page(*file_, 0, sizeof(ControlPage), false);
  std::memcpy(&header_, page.data(), sizeof(header_));
  if (std::memcmp(header_.magic, magic, sizeof(magic)) != 0)
    throw std::invalid_argument("memory that no channel of this version of fusedrl begins with");
  if (session.size() != sizeof(header_.session) ||
      std::memcmp(header_.session, session.data(), session.size()) != 0)
    throw std::invalid_argument("another session");
  head_ = std::make_shared<Mapping>(*file_, 0, geometry().slots_offset(), true);
  page_ = reinterpret_cast<ControlPage*>(head_->data());
  manifest_.assign(head_->data() + geometry().manifest_offset(), geometry().manifest_bytes);
  if (geometry().slot_bytes > 0)
    slots_ = std::make_shared<Mapping>(*file_, geometry().slots_offset(),
                                       geometry().slots * geometry().slot_bytes, false);
  enter();
}

// Entries of dead readers, whose deaths are to be reported, are used only if no other is left.
void Reader::enter() {
  for (const bool takes_dead : {false, true}) {
    for (uint64_t i = 0; i < geometry().max_readers; ++i) {
      ReaderEntry& entry = page_->reader[i];
      if ((entry.pid != 0 && !takes_dead) || !file_->try_lock_exclusive(reader_lock + i)) continue;
      at("open_locked");
      entry_ = &entry;
      entry.leased.store(0, std::memory_order_relaxed);
      entry.applied.store(no_version, std::memory_order_relaxed);
      entry.pid = static_cast<uint32_t>(getpid());
      at("open_registered");
      return;
    }
  }
  throw std::runtime_error("max_readers: expected fewer than " +
                           std::to_string(geometry().max_readers) +
                           " open readers, got all; close some, or create the channel with more");
}

void Reader::take(Lease& lease) {
  require_open();  // first: in a forked child, the mutex may stay locked
  std::lock_guard guard(mutex_);
  const Published current = published();
  if (current.slot < 0) return;
  at("lease_loaded");
  // If the publisher is writing the slot by now, it has published a later version.
  if (!lock(current.slot)) return;
  const Slot& slot = page_->slot[current.slot];
  if (slot.state.load(std::memory_order_acquire) != SlotState::ready ||
      slot.version.load(std::memory_order_relaxed) != current.version)
    return unlock(current.slot);
  at("lease_validated");
  lease.slot_ = current.slot;
  lease.version_ = current.version;
  entry_->applied.store(current.version, std::memory_order_release);
}

// Reads `other` under the mutex, since another thread may release it.
void Reader::share(Lease& lease, const Lease& other) {
  require_open();
  std::lock_guard guard(mutex_);
  const int slot = other.slot_;
  if (slot == Lease::none) return;
  ++leases_[slot];
  lease.slot_ = slot;
}

void Reader::release(Lease& lease) {
  if (!is_open()) return;
  std::lock_guard guard(mutex_);
  const int slot = lease.slot_.exchange(Lease::none);
  if (slot != Lease::none && is_open()) unlock(slot);
}

// The bit is set before the slot is locked and until after it is unlocked, so that a publisher that
// finds it locked can name the reader.
bool Reader::lock(int slot) {
  if (leases_[slot] == 0) {
    entry_->leased.fetch_or(uint64_t{1} << slot, std::memory_order_release);
    at("lease_registered");
    if (!file_->try_lock_shared(slot_lock + slot)) {
      entry_->leased.fetch_and(~(uint64_t{1} << slot), std::memory_order_release);
      return false;
    }
    at("lease_locked");
  }
  ++leases_[slot];
  return true;
}

void Reader::unlock(int slot) {
  if (--leases_[slot] > 0) return;
  page_->slot[slot].releases.fetch_add(1, std::memory_order_release);
  file_->unlock(slot_lock + slot);
  at("release_unlocked");
  entry_->leased.fetch_and(~(uint64_t{1} << slot), std::memory_order_release);
  at("release_unregistered");
  tell_publisher(*page_);
  at("release_told");
}

void Reader::wait(int64_t version, double seconds) {
  const uint32_t sequence = page_->sequence.load(std::memory_order_acquire);
  if (published().version >= version || ended() != nullptr) return;
  futex_wait(page_->sequence, sequence, seconds);
}

const char* Reader::ended() const {
  if (page_->closed.load(std::memory_order_acquire)) return "closed the channel";
  return file_->locked_elsewhere(alive_lock) ? nullptr : "is dead";
}

void Reader::close() {
  if (!is_open()) return;  // closed, or in a forked child, whose parent has the entry
  std::lock_guard guard(mutex_);
  if (!is_open()) return;
  for (uint64_t slot = 0; slot < max_slots; ++slot)
    if (leases_[slot] > 0) page_->slot[slot].releases.fetch_add(1, std::memory_order_release);
  entry_->leased = 0;
  entry_->pid = 0;
  file_->close();
  tell_publisher(*page_);
}

Lease::Lease(const Lease& other)
    : before_release(other.before_release), reader_(other.reader_), version_(other.version_) {
  reader_->share(*this, other);
}

Lease::~Lease() {
  try {
    release();
  } catch (const std::exception&) {
    // A slot that may be in use, or that the kernel does not unlock, stays leased until close().
  }
}

void Lease::release() {
  if (!before_release || !held()) return reader_->release(*this);
  const auto tell = std::exchange(before_release, nullptr);
  auto given = std::make_unique<Lease>(*this);
  reader_->release(*this);
  // If the call is interrupted, the lease leaks: the callee may have taken it by then.
  tell(reinterpret_cast<uintptr_t>(given.release()));
}

}  // namespace fusedrl::channel
