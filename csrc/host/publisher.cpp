#include "host/publisher.h"

#include <unistd.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace fusedrl::channel {

Publisher::Publisher(std::unique_ptr<MemoryFile> file, const Geometry& geometry,
                     const std::string& session, const std::string& manifest)
    : geometry_(geometry), file_(std::move(file)) {
  const uint64_t slots_offset = geometry.slots_offset();
  head_ = std::make_shared<Mapping>(*file_, 0, slots_offset, true);
  if (geometry.slot_bytes > 0)
    slots_ =
        std::make_shared<Mapping>(*file_, slots_offset, geometry.slots * geometry.slot_bytes, true);

  page_ = new (head_->data()) ControlPage{};
  Header& header = page_->header;
  std::memcpy(header.magic, magic, sizeof(magic));
  std::memcpy(header.session, session.data(), sizeof(header.session));
  header.publisher_pid = getpid();
  header.geometry = geometry;
  for (Slot& slot : page_->slot) slot.version = no_version;
  std::memcpy(head_->data() + geometry.manifest_offset(), manifest.data(), manifest.size());
  if (!file_->try_lock_exclusive(alive_lock)) throw std::logic_error("a new file is locked");
}

std::optional<int> Publisher::try_begin() {
  require_open();
  if (begun_) return std::nullopt;
  const int slots = static_cast<int>(geometry_.slots);
  for (int i = 1; i <= slots; ++i) {
    const int slot = (published_.slot + i) % slots;
    if (slot == published_.slot || !file_->try_lock_exclusive(slot_lock + slot)) continue;
    at("begin_locked");
    page_->slot[slot].releases.load(std::memory_order_acquire);
    page_->slot[slot].state.store(SlotState::writing, std::memory_order_release);
    begun_ = slot;
    at("begin_marked");
    return slot;
  }
  return std::nullopt;
}

void Publisher::commit(int slot, int64_t version) {
  require_open();
  Slot& entry = page_->slot[slot];
  entry.version.store(version, std::memory_order_relaxed);
  entry.state.store(SlotState::ready, std::memory_order_release);
  at("commit_marked");
  // Before publication, so that no reader finds the current slot locked.
  file_->unlock(slot_lock + slot);
  at("commit_unlocked");
  published_ = {version, slot};
  page_->published.store(published_.word(), std::memory_order_release);
  at("commit_published");
  page_->sequence.fetch_add(1, std::memory_order_release);
  futex_wake_all(page_->sequence);
  at("commit_woken");
  begun_.reset();
  tell_publisher(*page_);  // wakes threads of this process that wait to write
}

void Publisher::abort() {
  require_open();
  if (!begun_) return;
  page_->slot[*begun_].version.store(no_version, std::memory_order_relaxed);
  page_->slot[*begun_].state.store(SlotState::empty, std::memory_order_release);
  file_->unlock(slot_lock + *begun_);
  begun_.reset();
  tell_publisher(*page_);
}

std::vector<ReaderState> Publisher::readers(bool forget_dead) {
  require_open();
  std::vector<ReaderState> states;
  for (uint64_t i = 0; i < geometry_.max_readers; ++i) {
    ReaderEntry& entry = page_->reader[i];
    uint32_t pid = entry.pid;
    if (pid == 0) continue;
    const bool alive = file_->locked_elsewhere(reader_lock + i);
    // A reader that has closed meanwhile did not die.
    if (!alive && !(forget_dead ? entry.pid.compare_exchange_strong(pid, 0) : entry.pid == pid))
      continue;
    std::vector<int64_t> versions;
    for (uint64_t slot = 0; alive && slot < geometry_.slots; ++slot) {
      if (!(entry.leased >> slot & 1)) continue;
      const int64_t version = page_->slot[slot].version;
      // A reader that comes too late has its bit set for a moment; the slot's write may be aborted.
      if (version != no_version) versions.push_back(version);
    }
    states.push_back({pid, alive, std::move(versions), entry.applied});
  }
  return states;
}

uint32_t Publisher::progress() {
  require_open();
  page_->publisher_waits.store(1, std::memory_order_seq_cst);
  return page_->progress.load(std::memory_order_seq_cst);
}

void Publisher::wait(uint32_t progress, double seconds) {
  futex_wait(page_->progress, progress, seconds);
  page_->publisher_waits.store(0, std::memory_order_relaxed);
}

void Publisher::finish() {
  if (!file_->is_open()) return;  // closed, or in a forked child, whose parent has the channel
  page_->closed.store(1, std::memory_order_release);
  page_->sequence.fetch_add(1, std::memory_order_release);
  futex_wake_all(page_->sequence);
}

void Publisher::close() {
  finish();
  file_->close();
}

}  // namespace fusedrl::channel
