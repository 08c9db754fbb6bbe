// A publisher and readers as threads, for the sanitizers: each reader with an open file description
// of its own, every byte of every lease looked at.
//
// Its argument names a mistake for it to make, which ThreadSanitizer has to report.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/publisher.h"
#include "host/reader.h"

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer knows memory by its address: all mappings of a file become one. Linked with
// --wrap=mmap,--wrap=munmap.
namespace {
std::mutex mapped_mutex;
std::map<ino_t, std::pair<char*, size_t>> mapped;
}  // namespace

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);

void* __wrap_mmap(void* at, size_t bytes, int access, int flags, int fd, off_t offset) {
  struct stat file;
  if (fd < 0 || !(flags & MAP_SHARED) || fstat(fd, &file) != 0)
    return __real_mmap(at, bytes, access, flags, fd, offset);
  std::lock_guard guard(mapped_mutex);
  auto [found, fresh] = mapped.try_emplace(file.st_ino);
  if (fresh) {
    const size_t all = static_cast<size_t>(file.st_size);
    void* base = __real_mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    found->second = {static_cast<char*>(base), all};
  }
  return found->second.first + offset;
}

int __wrap_munmap(void* at, size_t bytes) {
  std::lock_guard guard(mapped_mutex);
  for (const auto& [inode, range] : mapped)
    if (at >= range.first && at < range.first + range.second) return 0;
  return __real_munmap(at, bytes);
}
}
#endif

namespace {

using namespace fusedrl::channel;

constexpr int slots = 3, versions = 20000;
constexpr size_t words = 2048;
const std::string session(32, 's');
std::string mistake;
std::atomic<int> leases{0}, wrong{0};

void write(char* slot, int64_t version) {
  int64_t* word = reinterpret_cast<int64_t*>(slot);
  for (size_t i = 0; i < words; ++i) word[i] = version;
}

bool holds(const char* slot, int64_t version) {
  const int64_t* word = reinterpret_cast<const int64_t*>(slot);
  bool all = true;
  for (size_t i = 0; i < words; ++i) all &= word[i] == version;
  return all;
}

void publish(Publisher& publisher) {
  for (int64_t version = 1; version <= versions; ++version) {
    std::optional<int> slot;
    for (uint32_t seen = publisher.progress(); !(slot = publisher.try_begin());
         seen = publisher.progress())
      publisher.wait(seen, 0.02);
    write(publisher.slot(*slot), version);
    if (version % 10 == 0) {
      publisher.abort();
      continue;
    }
    publisher.commit(*slot, version);
    if (mistake == "write_after_commit") write(publisher.slot(*slot), version);
    if (version % 50 == 1) publisher.readers(true);
  }
  publisher.finish();
}

void lease(const std::shared_ptr<Reader>& reader) {
  int64_t last = 0;
  while (!reader->ended()) {
    reader->wait(last + leases % 2, 0.01);
    Lease leased(reader);
    if (!leased.held()) continue;
    const int slot = leased.slot();
    const char* bytes = reader->slot(slot);
    wrong += leased.version() < last || !holds(bytes, leased.version());
    if (leases % 16 == 0) {  // two threads release one lease, and a third holds what it has
      const Lease shared(leased);
      std::thread other([&] { leased.release(); });
      leased.release();
      other.join();
      wrong += leased.held() || !shared.held() || !holds(bytes, leased.version());
    }
    leased.release();
    if (mistake == "read_after_release") wrong += !holds(bytes, leased.version());
    if (mistake == "read_without_lease") wrong += !holds(reader->slot(0), last);
    last = leased.version();
    ++leases;
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) mistake = arguments[1];
  const Geometry geometry{slots, words * sizeof(int64_t), 8, 2};
  std::unique_ptr<MemoryFile> file = MemoryFile::create();
  while (!file->reserve(geometry.file_bytes())) continue;
  Publisher publisher(std::move(file), geometry, session, "{}");
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      const auto reader = std::make_shared<Reader>(getpid(), publisher.fd(), session);
      std::thread other([&] { lease(reader); });  // two threads of one reader
      lease(reader);
      other.join();
    });
  }
  threads.emplace_back([&] {  // readers that come, and go with a lease
    for (bool open = true; open;) {
      const auto reader = std::make_shared<Reader>(getpid(), publisher.fd(), session);
      auto* leased = new Lease(reader);
      if (leased->held()) wrong += !holds(reader->slot(leased->slot()), leased->version());
      open = !reader->ended();
      std::thread other([&] { delete leased; });  // as a GPU gives it back
      reader->close();
      other.join();
    }
  });
  threads.emplace_back([&] { publish(publisher); });
  for (std::thread& thread : threads) thread.join();
  std::printf("%d leases, %d wrong\n", leases.load(), wrong.load());
  return leases > versions / 100 && wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
