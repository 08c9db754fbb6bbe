#include "host/memory_file.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>

namespace fusedrl::channel {

namespace {

// reserve() returns after each stretch, so that signal handlers run. It reserves small pieces,
// since the kernel undoes an allocation that a signal interrupts.
constexpr uint64_t stretch = uint64_t{256} << 20;
constexpr uint64_t piece = uint64_t{64} << 10;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int opened(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail(path);
  return fd;
}

struct flock range(int64_t byte, short type) {
  return {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1, .l_pid = 0};
}

}  // namespace

// The open files of this process, which forked children close: a descriptor kept by a child would
// keep the locks of a dead parent. Writable mappings become read-only in children: a child that
// unwinds the parent's stack would overwrite what the parent has published since. Files are opened
// and closed under the mutex, for which fork() waits.
class OpenFiles {
 public:
  static OpenFiles& instance() {
    static OpenFiles* files = new OpenFiles;  // outlives every static destructor
    return *files;
  }
  std::mutex mutex;
  std::set<MemoryFile*> files;
  std::set<const Mapping*> writable;

 private:
  OpenFiles() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] {
                     for (MemoryFile* file : instance().files) {
                       ::close(file->fd_);  // without unlocking, as the locks are the parent's
                       file->fd_ = -1;
                     }
                     instance().files.clear();
                     for (const Mapping* mapping : instance().writable)
                       mprotect(mapping->data(), mapping->bytes(), PROT_READ);
                     instance().mutex.unlock();
                   });
  }
};

Mapping::Mapping(const MemoryFile& file, uint64_t offset, size_t bytes, bool writable)
    : bytes_(bytes) {
  std::lock_guard guard(OpenFiles::instance().mutex);
  // A mapping keeps its description open, also in forked children, so it gets a separate one.
  const int fd = file.reopened();
  data_ = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd,
               static_cast<off_t>(offset));
  ::close(fd);
  if (data_ == MAP_FAILED) fail("mapping " + std::to_string(bytes) + " bytes of a weight channel");
  if (writable) OpenFiles::instance().writable.insert(this);
}

Mapping::~Mapping() {
  std::lock_guard guard(OpenFiles::instance().mutex);
  OpenFiles::instance().writable.erase(this);
  munmap(data_, bytes_);
}

MemoryFile::MemoryFile(int fd) : fd_(fd), pid_(getpid()) {
  OpenFiles::instance().files.insert(this);
}

std::unique_ptr<MemoryFile> MemoryFile::create() {
  std::lock_guard guard(OpenFiles::instance().mutex);
  const int fd = memfd_create("fusedrl-channel", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0 || fchmod(fd, 0600) != 0) fail("memfd_create");
  return std::unique_ptr<MemoryFile>(new MemoryFile(fd));
}

bool MemoryFile::reserve(uint64_t bytes) {
  const uint64_t end = std::min(bytes, reserved_ + stretch);
  while (reserved_ < end) {
    const uint64_t some = std::min(piece, end - reserved_);
    errno = posix_fallocate(fd(), static_cast<off_t>(reserved_), static_cast<off_t>(some));
    if (errno == EINTR) return false;
    if (errno != 0) fail("reserving " + std::to_string(bytes) + " bytes of shared memory");
    reserved_ += some;
  }
  if (reserved_ < bytes) return false;
  if (fcntl(fd(), F_ADD_SEALS, seals) != 0) fail("F_ADD_SEALS");
  return true;
}

std::unique_ptr<MemoryFile> MemoryFile::reopen(int64_t pid, int fd) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  char target[64] = {};
  if (readlink(path.c_str(), target, sizeof(target) - 1) < 0) fail(path);
  // Opening anything but a memory file may have side effects.
  if (std::string(target).rfind("/memfd:", 0) != 0)
    throw std::invalid_argument(path + ", which is not shared memory");
  std::unique_ptr<MemoryFile> file;  // destroyed after the guard, as it closes under the same mutex
  std::lock_guard guard(OpenFiles::instance().mutex);
  file.reset(new MemoryFile(opened(path)));
  // Readers would end by SIGBUS if the file could be shrunk.
  if ((fcntl(file->fd_, F_GET_SEALS) & seals) != seals)
    throw std::invalid_argument("shared memory that is not sealed");
  return file;
}

int MemoryFile::fd() const {
  if (fd_ >= 0) return fd_;
  throw std::runtime_error(
      pid_ == getpid()
          ? "weight channel: expected an open one, got one that is closed; make or open another"
          : "weight channel: expected the process that opened it (pid " + std::to_string(pid_) +
                "), got a forked child (pid " + std::to_string(getpid()) +
                "); open the handle again in this process");
}

uint64_t MemoryFile::bytes() const {
  struct stat facts;
  if (fstat(fd(), &facts) != 0) fail("fstat");
  return static_cast<uint64_t>(facts.st_size);
}

int MemoryFile::reopened() const { return opened("/proc/self/fd/" + std::to_string(fd())); }

void MemoryFile::close() {
  std::lock_guard guard(OpenFiles::instance().mutex);
  if (fd_ < 0) return;
  OpenFiles::instance().files.erase(this);
  ::close(fd_);
  fd_ = -1;
}

bool MemoryFile::lock(int64_t byte, short type) {
  struct flock lock = range(byte, type);
  if (fcntl(fd(), F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  fail("F_OFD_SETLK");
}

bool MemoryFile::locked_elsewhere(int64_t byte) const {
  struct flock lock = range(byte, F_WRLCK);
  if (fcntl(fd(), F_OFD_GETLK, &lock) != 0) fail("F_OFD_GETLK");
  return lock.l_type != F_UNLCK;
}

}  // namespace fusedrl::channel
