// A memory file (memfd) that processes share, and the kernel's locks on it.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fusedrl::channel {

// A range of a memory file, mapped until its last owner is gone. In forked children it is
// read-only, since its content belongs to the parent.
class Mapping {
 public:
  // Throws std::system_error where the kernel refuses, as everything in this file does.
  Mapping(const class MemoryFile& file, uint64_t offset, size_t bytes, bool writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

// One open file description of a memory file, for locks, which end with the last reference to the
// description. That is this object's descriptor: mappings have separate descriptions, and copies of
// the descriptor are closed by exec, and in forked children before they run anything else.
class MemoryFile {
 public:
  // Makes an empty file that no other process has open.
  static std::unique_ptr<MemoryFile> create();
  // Reserves more of `bytes`, for a fraction of a second or until a signal. Returns whether all are
  // reserved; from then on the size of the file is fixed. Too little memory is an error here,
  // instead of SIGBUS in a reader later.
  bool reserve(uint64_t bytes);
  // Opens the file of a descriptor of this or another process. Throws std::invalid_argument unless
  // create() made the file.
  static std::unique_ptr<MemoryFile> reopen(int64_t pid, int fd);
  ~MemoryFile() { close(); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  int fd() const;
  bool is_open() const { return fd_ >= 0; }
  uint64_t bytes() const;
  // Opens a new description of the same file, without locks; the caller closes the descriptor.
  int reopened() const;
  void close();

  // The first two return false, without waiting, if another open file description has the lock.
  bool try_lock_shared(int64_t byte) { return lock(byte, F_RDLCK); }
  bool try_lock_exclusive(int64_t byte) { return lock(byte, F_WRLCK); }
  void unlock(int64_t byte) { lock(byte, F_UNLCK); }
  // Whether another open file description holds a lock.
  bool locked_elsewhere(int64_t byte) const;

 private:
  friend class OpenFiles;
  explicit MemoryFile(int fd);
  bool lock(int64_t byte, short type);

  std::atomic<int> fd_;
  const int64_t pid_;
  uint64_t reserved_ = 0;
};

}  // namespace fusedrl::channel
