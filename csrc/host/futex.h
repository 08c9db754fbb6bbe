// Sleep until a word in shared memory changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <ctime>

namespace fusedrl::channel {

// Returns when `word` is not `seen`, when woken, on a signal, or after `seconds`.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  if (seconds <= 0) return;
  timespec time;
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace fusedrl::channel
