#include "host/memory_file.h"

#include <fcntl.h>
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

// Reserving this much takes a fraction of a second. If signals interrupt it again and again,
// shorter stretches succeed.
constexpr uint64_t longest_stretch = uint64_t{256} << 20;
constexpr uint64_t shortest_stretch = 4096;
constexpr int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Repeats a system call that a signal has interrupted. Python's handler of the signal runs only
// later, so this is for calls that are short.
template <class Call>
int retried(const Call& call) {
  int result;
  do result = call();
  while (result < 0 && errno == EINTR);
  return result;
}

int opened(const std::string& path) {
  const int fd = retried([&] { return open(path.c_str(), O_RDWR | O_CLOEXEC); });
  if (fd < 0) fail(path);
  return fd;
}

struct flock range(int64_t byte, short type) {
  struct flock range = {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  return range;
}

}  // namespace

// The open files of this process, which forked children close: a descriptor that a child kept would
// keep the locks of a dead parent. Its writable mappings become read-only there: a child that
// unwinds the parent's stack would write into what the parent has published since. Files are opened
// and closed under the mutex, and fork waits for it.
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
                       mprotect(mapping->data_, mapping->bytes_, PROT_READ);
                     instance().mutex.unlock();
                   });
  }
};

Mapping::Mapping(const MemoryFile& file, uint64_t offset, size_t bytes, bool writable)
    : bytes_(bytes) {
  std::lock_guard guard(OpenFiles::instance().mutex);
  // A mapping keeps its description open, in forked children too, so it gets one of its own.
  const int fd = file.reopened();
  data_ = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd,
               static_cast<off_t>(offset));
  const int error = errno;
  ::close(fd);
  errno = error;
  if (data_ == MAP_FAILED) fail("mapping " + std::to_string(bytes) + " bytes of a weight channel");
  if (writable) OpenFiles::instance().writable.insert(this);
}

Mapping::~Mapping() {
  std::lock_guard guard(OpenFiles::instance().mutex);
  OpenFiles::instance().writable.erase(this);
  munmap(data_, bytes_);
}

MemoryFile::MemoryFile(int fd) : fd_(fd), pid_(getpid()), stretch_(longest_stretch) {
  OpenFiles::instance().files.insert(this);
}

MemoryFile::~MemoryFile() { close(); }

std::unique_ptr<MemoryFile> MemoryFile::create(const std::string& name) {
  std::unique_lock guard(OpenFiles::instance().mutex);
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  std::unique_ptr<MemoryFile> file(new MemoryFile(fd));
  guard.unlock();
  if (fchmod(fd, 0600) != 0) fail("fchmod");
  return file;
}

bool MemoryFile::reserve(uint64_t bytes) {
  const uint64_t some = std::min(stretch_, bytes - reserved_);
  const int error = posix_fallocate(fd(), static_cast<off_t>(reserved_), static_cast<off_t>(some));
  if (error == EINTR) {
    // The kernel has released what this call had reserved.
    stretch_ = std::max(stretch_ / 2, shortest_stretch);
    return false;
  }
  if (error != 0) {
    errno = error;
    fail("reserving " + std::to_string(bytes) + " bytes of shared memory");
  }
  reserved_ += some;
  stretch_ = std::min(stretch_ * 2, longest_stretch);
  return reserved_ == bytes;
}

void MemoryFile::seal() {
  if (fcntl(fd(), F_ADD_SEALS, seals) != 0) fail("F_ADD_SEALS");
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
  // If somebody could shrink the file, its readers would end by SIGBUS.
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

bool MemoryFile::try_lock(int64_t byte, bool shared) {
  struct flock lock = range(byte, shared ? F_RDLCK : F_WRLCK);
  if (retried([&] { return fcntl(fd(), F_OFD_SETLK, &lock); }) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  fail("F_OFD_SETLK");
}

void MemoryFile::unlock(int64_t byte) {
  struct flock lock = range(byte, F_UNLCK);
  if (retried([&] { return fcntl(fd(), F_OFD_SETLK, &lock); }) != 0) fail("F_OFD_SETLK");
}

bool MemoryFile::locked_elsewhere(int64_t byte) const {
  struct flock lock = range(byte, F_WRLCK);
  if (retried([&] { return fcntl(fd(), F_OFD_GETLK, &lock); }) != 0) fail("F_OFD_GETLK");
  return lock.l_type != F_UNLCK;
}

}  // namespace fusedrl::channel
