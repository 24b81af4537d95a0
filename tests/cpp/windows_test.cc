// Device memory into which peers write: when it may be freed (device/windows.h).
#include "device/windows.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "device_cases.h"
#include "transport/host.h"

namespace cgx::device {
namespace {

// Memory that counts itself.
struct Counted {
  std::atomic<int> used = 0;
  Memory make() {
    ++used;
    return {new std::byte, [this](std::byte* at) {
              --used;
              delete at;
            }};
  }
};

// The announcement of the rank with this wire, in another process of this host.
Bytes announced(uint64_t wire, pid_t pid, const std::vector<uint64_t>& closed = {}) {
  Bytes bytes = to_bytes(wire);
  for (const uint64_t each :
       {this_memory_number(), static_cast<uint64_t>(pid), uint64_t{closed.size()}})
    for (const std::byte byte : as_bytes(each)) bytes.push_back(byte);
  for (const uint64_t each : closed)
    for (const std::byte byte : as_bytes(each)) bytes.push_back(byte);
  return bytes;
}

// Another process, until end().
struct Child {
  pid_t pid = fork();
  Child() {
    if (pid != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (true) pause();
  }
  void end() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }
  ~Child() { end(); }
};

std::vector<uint64_t> closed_in(const Bytes& announcement) {
  std::vector<uint64_t> words(announcement.size() / 8);
  std::memcpy(words.data(), announcement.data(), 8 * words.size());
  return {words.begin() + 4, words.end()};
}

void connect_all(Windows* windows, uint64_t wire, const std::vector<Bytes>& announcements) {
  windows->connect(wire, announcements).clear();
  windows->know(wire, announcements);
}

void a_window_lives_until_its_peers_have_unmapped_it() {
  Counted memory;
  Windows windows;
  Child other, third;
  const uint64_t first = windows.add(memory.make());
  connect_all(&windows, first,
              {windows.announcement(first), announced(7, other.pid), announced(8, third.pid)});
  windows.close(first);
  windows.close(first);
  CHECK(memory.used == 1, "peers map it");

  // The other process has closed its wire 7, and learns that `first` is closed. The third does not.
  const uint64_t second = windows.add(memory.make());
  const Bytes mine = windows.announcement(second);
  CHECK(closed_in(mine) == std::vector{first}, "what this process has closed");
  CHECK(windows.connect(second, std::vector{mine, announced(9, other.pid, {7})}).empty(), "mapped");
  CHECK(closed_in(windows.announcement(second)) == std::vector{first}, "nobody knows yet");
  windows.know(second, std::vector{mine, announced(9, other.pid, {7})});
  CHECK(memory.used == 2, "the third process maps it");
  CHECK(closed_in(windows.announcement(second)) == std::vector{first}, "the third does not know");
  third.end();
  windows.close(second);
  CHECK(memory.used == 1, "the third process has ended");
  other.end();
  const uint64_t last = windows.add(memory.make());
  connect_all(&windows, last, {windows.announcement(last)});
  CHECK(memory.used == 1, "the window of the last wire: all peers have ended");
  CHECK(closed_in(windows.announcement(last)).empty(), "nobody is left to tell");
  windows.close(last);
  CHECK(memory.used == 0, "no peers");
}

void a_window_that_was_offered_but_not_connected_is_kept() {
  Counted memory;
  {
    Windows windows;
    const uint64_t wire = windows.add(memory.make());
    windows.close(wire);
    CHECK(memory.used == 1, "a peer may map it without this rank's knowledge");
    windows.withdraw(windows.add(memory.make()));
    CHECK(memory.used == 1, "no peer maps the second window");
  }
  CHECK(memory.used == 0, "the test's end");
}

void malformed_announcements_are_errors() {
  Windows windows;
  const uint64_t wire = windows.add(nullptr);
  const Bytes mine = windows.announcement(wire);
  Bytes many = announced(1, 1, std::vector<uint64_t>(257)), short_one = announced(1, 1, {2});
  short_one.pop_back();
  for (const Bytes& bad : {Bytes(), Bytes(23), short_one, many})
    error_of([&] { std::ignore = windows.connect(wire, std::vector{mine, bad}); }, CGX_PEER_FAILED);
}

// Ranks are threads of one process. The fake device aborts if memory is freed that a peer maps.
void memory_does_not_grow_with_communicators() {
  const int64_t before = FakeDevice::bytes_in_use;
  for (int i = 0; i < 5; ++i) {
    {
      const Job job(3, "SHM", 60);
      int64_t compared = 0;
      compare(job, {}, &compared);
    }
    CHECK(FakeDevice::bytes_in_use == before, "%s",
          join(i, ": ", FakeDevice::bytes_in_use.load() - before, " bytes").c_str());
  }
}

}  // namespace
}  // namespace cgx::device

int main() {
  cgx::device::a_window_lives_until_its_peers_have_unmapped_it();
  cgx::device::a_window_that_was_offered_but_not_connected_is_kept();
  cgx::device::malformed_announcements_are_errors();
  cgx::device::memory_does_not_grow_with_communicators();
}
