#include "host/write_report.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string_view>
#include <thread>

namespace fusedrl::channel {

// All existing reports. The handler reads them without a lock, so that whoever removes one waits
// until no handler is reading.
class WriteReports {
 public:
  static WriteReports& instance() {
    static WriteReports* reports = new WriteReports;  // outlives every static destructor
    return *reports;
  }

  void add(WriteReport* report) {
    std::lock_guard guard(mutex_);
    report->next_.store(first_.load());
    first_.store(report);
    install();
  }

  void remove(WriteReport* report) {
    std::lock_guard guard(mutex_);
    std::atomic<WriteReport*>* link = &first_;
    while (link->load() != report) link = &link->load()->next_;
    link->store(report->next_.load());
    while (readers_.load() > 0) std::this_thread::yield();
  }

  // Called by the handler, so nothing here allocates or locks.
  void tell(uintptr_t address) {
    if (address == 0) return;
    readers_.fetch_add(1);
    for (const WriteReport* report = first_; report != nullptr; report = report->next_) {
      // Only once, as the next handler may return to the same write.
      if (report->covers(address) && told_.exchange(address) != address) report->tell(address);
    }
    readers_.fetch_sub(1);
  }

 private:
  WriteReports() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().readers_ = 0;  // the readers were threads of the parent
                     instance().mutex_.unlock();
                   });
  }
  void install();

  std::mutex mutex_;
  std::atomic<WriteReport*> first_{nullptr};
  std::atomic<int> readers_{0};
  std::atomic<uintptr_t> told_{0};
};

namespace {

struct sigaction previous;

bool is_function(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

void set_default(int signal) {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
}

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

// Does what would have happened without this handler.
void hand_on(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by kill, raise and the like, not by an instruction
  if (is_function(previous)) {
    if (previous.sa_flags & SA_RESETHAND) set_default(signal);
    if (previous.sa_flags & SA_SIGINFO)
      previous.sa_sigaction(signal, info, context);
    else
      previous.sa_handler(signal);
    return;
  }
  if (sent && previous.sa_handler == SIG_IGN) return;
  // The instruction runs again and ends the process there, so that core dumps show it.
  set_default(signal);
  if (sent) syscall(SYS_rt_tgsigqueueinfo, getpid(), syscall(SYS_gettid), signal, info);
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  WriteReports::instance().tell(written(info, context));
  errno = error;
  hand_on(signal, info, context);
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

// Called under the mutex. A handler that was installed after this one stays: it may call this one,
// which must not call it.
void WriteReports::install() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  static bool before = false;
  if (before && is_function(current)) return;
  before = true;
  previous = current;
  struct sigaction ours = {};
  ours.sa_sigaction = handle;
  ours.sa_mask = current.sa_mask;
  // The handler's stack and signal mask are those of the former handler.
  ours.sa_flags = SA_SIGINFO | (is_function(current) ? current.sa_flags & ~SA_RESETHAND
                                                     : static_cast<int>(SA_ONSTACK));
  sigaction(SIGSEGV, &ours, nullptr);
}

WriteReport::WriteReport(std::shared_ptr<Mapping> head, const Mapping& slots,
                         const Geometry& geometry, std::vector<Entry> entries)
    : head_(std::move(head)),
      begin_(reinterpret_cast<uintptr_t>(slots.data())),
      bytes_(slots.bytes()),
      slot_bytes_(geometry.slot_bytes),
      entries_(std::move(entries)) {
  WriteReports::instance().add(this);
}

WriteReport::~WriteReport() { WriteReports::instance().remove(this); }

void WriteReport::tell(uintptr_t address) const {
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
