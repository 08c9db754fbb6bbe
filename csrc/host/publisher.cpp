#include "host/publisher.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "host/futex.h"

namespace fusedrl::channel {

namespace {

constexpr uint64_t page_bytes = 4096;
constexpr uint64_t rounded(uint64_t bytes) {
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

}  // namespace

Publisher::Publisher(int slots, uint64_t slot_bytes, int max_readers, const std::string& session,
                     const std::string& manifest) {
  const uint64_t table = sizeof(ControlPage) + max_readers * sizeof(ReaderEntry);
  const uint64_t slots_offset = rounded(rounded(table) + manifest.size());
  const uint64_t file_bytes = slots_offset + slots * slot_bytes;
  file_ = MemoryFile::create("fusedrl-channel", file_bytes);
  head_ = std::make_shared<Mapping>(*file_, 0, slots_offset, true);
  if (slot_bytes > 0)
    slots_ = std::make_shared<Mapping>(*file_, slots_offset, slots * slot_bytes, true);

  page_ = new (head_->data()) ControlPage{};
  page_->publisher_pid = getpid();
  page_->file_bytes = file_bytes;
  page_->manifest_offset = rounded(table);
  page_->manifest_bytes = manifest.size();
  page_->slots_offset = slots_offset;
  page_->slot_bytes = slot_bytes;
  page_->slots = slots;
  page_->max_readers = max_readers;
  for (Slot& slot : page_->slot) slot.version = no_version;
  std::memcpy(head_->data() + page_->manifest_offset, manifest.data(), manifest.size());
  std::memcpy(page_->session, session.data(), sizeof(page_->session));
  std::memcpy(page_->magic, magic, sizeof(magic));
  if (!file_->try_lock_exclusive(alive_lock)) throw std::logic_error("a new file is locked");
}

std::optional<int> Publisher::try_begin() {
  const int current = Published::of(page_->published.load(std::memory_order_relaxed)).slot;
  const int slots = static_cast<int>(page_->slots);
  for (int i = 1; i <= slots; ++i) {
    const int slot = (last_ + i) % slots;
    if (slot == current || !file_->try_lock_exclusive(slot_lock + slot)) continue;
    at(Step::begin_locked);
    page_->slot[slot].releases.load(std::memory_order_acquire);
    page_->slot[slot].state.store(SlotState::writing, std::memory_order_release);
    at(Step::begin_marked);
    return slot;
  }
  return std::nullopt;
}

void Publisher::commit(int slot, int64_t version, uint64_t checksum) {
  Slot& entry = page_->slot[slot];
  entry.checksum.store(checksum, std::memory_order_relaxed);
  entry.version.store(version, std::memory_order_relaxed);
  entry.state.store(SlotState::ready, std::memory_order_release);
  at(Step::commit_marked);
  // Before it is published: a reader never finds the current slot locked.
  file_->unlock(slot_lock + slot);
  at(Step::commit_unlocked);
  page_->published.store(Published{version, slot}.word(), std::memory_order_release);
  last_ = slot;
  at(Step::commit_published);
  page_->sequence.fetch_add(1, std::memory_order_release);
  futex_wake_all(page_->sequence);
  at(Step::commit_woken);
}

void Publisher::abort(int slot) {
  page_->slot[slot].version.store(no_version, std::memory_order_relaxed);
  page_->slot[slot].state.store(SlotState::empty, std::memory_order_release);
  file_->unlock(slot_lock + slot);
}

std::vector<ReaderState> Publisher::readers(bool forget_dead) {
  std::vector<ReaderState> found;
  for (uint32_t i = 0; i < page_->max_readers; ++i) {
    ReaderEntry& entry = page_->reader[i];
    const int64_t pid = entry.pid.load(std::memory_order_acquire);
    if (pid == 0) continue;
    ReaderState state{pid, true, {}, entry.applied.load(std::memory_order_acquire)};
    const uint64_t leased = entry.leased.load(std::memory_order_acquire);
    for (uint32_t slot = 0; slot < page_->slots; ++slot)
      if (leased >> slot & 1) state.leased.push_back(page_->slot[slot].version);
    if (!file_->locked_elsewhere(reader_lock + i) && file_->try_lock_exclusive(reader_lock + i)) {
      // Under the lock, so that no new reader has the entry.
      state.alive = false;
      state.leased.clear();
      if (forget_dead && entry.pid.load(std::memory_order_relaxed) == pid) entry.pid = 0;
      file_->unlock(reader_lock + i);
    }
    found.push_back(state);
  }
  return found;
}

uint32_t Publisher::progress() {
  page_->publisher_waits.store(1, std::memory_order_seq_cst);
  return page_->progress.load(std::memory_order_seq_cst);
}

void Publisher::wait(uint32_t progress, double seconds) {
  futex_wait(page_->progress, progress, seconds);
  page_->publisher_waits.store(0, std::memory_order_relaxed);
}

void Publisher::finish() {
  if (!file_->is_open()) return;  // also in a forked child: the channel is its parent's
  page_->closed.store(1, std::memory_order_release);
  page_->sequence.fetch_add(1, std::memory_order_release);
  futex_wake_all(page_->sequence);
}

void Publisher::close() {
  finish();
  file_->close();
}

}  // namespace fusedrl::channel
