// A memory file (memfd) that processes share, and the kernel's locks on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace fusedrl::channel {

// A range of a memory file in this process's memory, unmapped with its last owner.
class Mapping {
 public:
  // Throws std::system_error, as all of this file does where the kernel refuses.
  Mapping(const class MemoryFile& file, uint64_t offset, size_t bytes, bool writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }
  // Something that ends before the memory is unmapped.
  void keep(std::shared_ptr<void> companion) { companion_ = std::move(companion); }

 private:
  void* data_;
  size_t bytes_;
  std::shared_ptr<void> companion_;
};

// One open file description of a memory file, for locks. They end with the last reference to it,
// which is this object's descriptor: mappings have a description of their own, a child that fork
// makes closes its copy before it runs anything else, and exec does so too.
class MemoryFile {
 public:
  // Empty, and nobody else's.
  static std::unique_ptr<MemoryFile> create(const std::string& name);
  // Reserves the next stretch of `bytes`, or none where a signal comes; whether all are reserved. A
  // machine without the memory says so here, not by SIGBUS in a reader.
  bool reserve(uint64_t bytes);
  // Nobody resizes it from here on.
  void seal();
  // The file behind a descriptor of another process, or of this one. Throws std::invalid_argument
  // where it is none that create made.
  static std::unique_ptr<MemoryFile> reopen(int64_t pid, int fd);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // Throws std::runtime_error once closed, or in a child of the process that opened it.
  int fd() const;
  bool is_open() const { return fd_ >= 0; }
  uint64_t bytes() const;
  // A new description of the same file, without our locks, on a descriptor that the caller closes.
  int reopened() const;
  void close();

  // Neither waits: false where another open file description holds the lock.
  bool try_lock_shared(int64_t byte) { return try_lock(byte, true); }
  bool try_lock_exclusive(int64_t byte) { return try_lock(byte, false); }
  void unlock(int64_t byte);
  // Whether another open file description holds a lock.
  bool locked_elsewhere(int64_t byte) const;

 private:
  friend class OpenFiles;
  explicit MemoryFile(int fd);
  bool try_lock(int64_t byte, bool shared);

  int fd_;
  int64_t pid_;
  uint64_t reserved_ = 0, stretch_;
};

}  // namespace fusedrl::channel
