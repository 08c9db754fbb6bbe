// Reports on stderr, when a write to shared weights ends a process, what it wrote to and what to do
// instead.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/channel_page.h"
#include "host/memory_file.h"

namespace fusedrl::channel {

// Registers the read-only slots of a channel with this process's SIGSEGV handler while it exists.
// The first one installs the handler, which leaves everything but the report to the former one.
class WriteReport {
 public:
  struct Entry {
    uint64_t offset;  // in a slot
    std::string name;
  };

  // `head` begins with the control page; entries come in the order of their offsets.
  WriteReport(std::shared_ptr<Mapping> head, const Mapping& slots, const Geometry& geometry,
              std::vector<Entry> entries);
  ~WriteReport();
  WriteReport(const WriteReport&) = delete;
  WriteReport& operator=(const WriteReport&) = delete;

  // Says it of a write to this address, if it lies in the slots; called by the handler.
  void tell(uintptr_t address) const;

 private:
  const std::shared_ptr<Mapping> head_;
  const uintptr_t begin_;
  const uint64_t bytes_, slot_bytes_;
  const std::vector<Entry> entries_;
};

}  // namespace fusedrl::channel
