#include "host/write_report.h"

#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>
#include <thread>

namespace fusedrl::channel {

namespace {

// The reports that exist. The handler reads them without a lock, so whoever removes one waits until
// no handler is reading. A channel that finds no room here has no report.
std::atomic<const WriteReport*> reports[256];
std::atomic<int> handlers{0};
struct sigaction previous;

// The read-only address that was written to, or 0.
uintptr_t written(const siginfo_t* info, const void* context) {
  if (info->si_code == SEGV_ACCERR) return reinterpret_cast<uintptr_t>(info->si_addr);
  // A handler that was called before may have raised the signal again, as faulthandler does. Then
  // the kernel still has the address of the thread's last fault.
  if (info->si_code != SI_TKILL || info->si_pid != getpid()) return 0;
  [[maybe_unused]] const mcontext_t& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  constexpr greg_t page_fault = 14;
  if (machine.gregs[REG_TRAPNO] == page_fault) return machine.gregs[REG_CR2];
#elif defined(__aarch64__)
  return machine.fault_address;
#endif
  return 0;
}

// Whatever signal comes next is the former handler's, also the one that follows when the
// instruction runs again. So the process ends there as it would without this handler, and core
// dumps show it.
void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (const uintptr_t address = written(info, context)) {
    ++handlers;
    for (const auto& each : reports)
      if (const WriteReport* report = each) report->tell(address);
    --handlers;
  }
  sigaction(SIGSEGV, &previous, nullptr);
  if (info->si_code <= 0) raise(signal);  // no instruction has caused it, so none repeats it
  errno = error;
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
  return true;
}

// One line, built on the stack because a handler must not allocate.
class Line {
 public:
  Line& operator<<(std::string_view text) {
    const size_t some = std::min(text.size(), sizeof(text_) - length_);
    std::memcpy(text_ + length_, text.data(), some);
    length_ += some;
    return *this;
  }
  Line& operator<<(int64_t number) {
    char digits[20];
    size_t first = sizeof(digits);
    do digits[--first] = static_cast<char>('0' + number % 10);
    while ((number /= 10) > 0);
    return *this << std::string_view(digits + first, sizeof(digits) - first);
  }
  void write() const {
    for (size_t done = 0; done < length_;) {
      const ssize_t some = ::write(STDERR_FILENO, text_ + done, length_ - done);
      if (some < 0 && errno != EINTR) return;
      done += std::max<ssize_t>(some, 0);
    }
  }

 private:
  char text_[1024];
  size_t length_ = 0;
};

}  // namespace

WriteReport::WriteReport(std::shared_ptr<Mapping> head, const Mapping& slots,
                         const Geometry& geometry, std::vector<Entry> entries)
    : head_(std::move(head)),
      begin_(reinterpret_cast<uintptr_t>(slots.data())),
      bytes_(slots.bytes()),
      slot_bytes_(geometry.slot_bytes),
      entries_(std::move(entries)) {
  [[maybe_unused]] static const bool installed = install();
  for (auto& each : reports) {
    const WriteReport* free = nullptr;
    if (each.compare_exchange_strong(free, this)) break;
  }
}

WriteReport::~WriteReport() {
  for (auto& each : reports) {
    const WriteReport* own = this;
    if (each.compare_exchange_strong(own, nullptr)) break;
  }
  // A forked child may have inherited the count of a handler that runs in its parent.
  for (int i = 0; i < 1000 && handlers > 0; ++i) std::this_thread::yield();
}

void WriteReport::tell(uintptr_t address) const {
  if (address - begin_ >= bytes_) return;
  const uint64_t slot = (address - begin_) / slot_bytes_, offset = (address - begin_) % slot_bytes_;
  const auto after =
      std::upper_bound(entries_.begin(), entries_.end(), offset,
                       [](uint64_t value, const Entry& entry) { return value < entry.offset; });
  const auto* page = reinterpret_cast<const ControlPage*>(head_->data());
  const int64_t version = page->slot[slot].version;
  Line line;
  line << "fusedrl: a write to ";
  if (after != entries_.begin())
    line << std::string_view(std::prev(after)->name).substr(0, 512);
  else
    line << "weights";
  if (version >= 0) line << " of version " << version;
  line << " of a weight channel ends this process: the memory is read-only, since other processes "
          "compute with it; load with mode=\"copy\" to write to parameters, or clone() what you "
          "write to (python -X faulthandler shows where that is)\n";
  line.write();
}

}  // namespace fusedrl::channel
