#include "device/windows.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "base/status.h"
#include "transport/host.h"

namespace cgx::device {
namespace {

constexpr int64_t kMostClosed = 256;  // wires in an announcement; others wait for the next one

struct Head {
  uint64_t wire;
  uint64_t memory;  // this_memory_number()
  int64_t pid;
  int64_t closed;  // number of wires that follow
};

struct Announced {
  uint64_t wire;
  bool is_here;  // on this host. Others cannot map windows of this process.
  pid_t pid;
  std::vector<uint64_t> closed;
};

Announced read(std::span<const std::byte> bytes) {
  const size_t size = std::min(bytes.size(), sizeof(Head));
  const auto head = from_bytes<Head>(bytes.first(size), "a rank's announcement of its windows");
  require(head.closed >= 0 && head.closed <= kMostClosed &&
              bytes.size() == sizeof(Head) + head.closed * sizeof(uint64_t),
          CGX_PEER_FAILED, "a rank's announcement of its windows has ", bytes.size(), " bytes");
  Announced announced{
      head.wire, head.memory == this_memory_number(), static_cast<pid_t>(head.pid), {}};
  announced.closed.resize(head.closed);
  std::ranges::copy(bytes.subspan(sizeof(Head)),
                    std::as_writable_bytes(std::span(announced.closed)).begin());
  return announced;
}

std::vector<Announced> read(std::span<const Bytes> announcements) {
  std::vector<Announced> all;
  for (const Bytes& each : announcements) all.push_back(read(std::span<const std::byte>(each)));
  return all;
}

}  // namespace

Windows& Windows::of_process() {
  static auto& windows = *new Windows;  // device memory is not freed while the process ends
  return windows;
}

uint64_t Windows::add(Memory window) {
  const std::lock_guard lock(mutex_);
  static std::random_device random;
  uint64_t wire = 0;
  while (wire == 0 || windows_.contains(wire)) wire = uint64_t{random()} << 32 | random();
  windows_[wire].memory = std::move(window);
  return wire;
}

void Windows::withdraw(uint64_t wire) {
  Memory freed;  // after the lock
  const std::lock_guard lock(mutex_);
  const auto found = windows_.find(wire);
  if (found == windows_.end()) return;
  freed = std::move(found->second.memory);
  windows_.erase(found);
}

Bytes Windows::announcement(uint64_t wire) const {
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> closed;
  for (const auto& [each, untold] : closed_)
    if (closed.size() < kMostClosed) closed.push_back(each);
  Bytes bytes =
      to_bytes(Head{wire, this_memory_number(), getpid(), static_cast<int64_t>(closed.size())});
  const auto list = std::as_bytes(std::span(closed));
  bytes.insert(bytes.end(), list.begin(), list.end());
  return bytes;
}

std::vector<Memory> Windows::connect(uint64_t wire, std::span<const Bytes> announcements) {
  const std::vector<Announced> all = read(announcements);
  const std::lock_guard lock(mutex_);
  Window& own = windows_.at(wire);
  for (const Announced& rank : all) {
    if (rank.wire == wire || !rank.is_here) continue;
    if (rank.pid != getpid()) {
      own.peers[rank.pid] = Process::of(rank.pid);
    } else if (const auto thread = windows_.find(rank.wire);
               thread == windows_.end() || thread->second.closed) {
      continue;
    }
    own.mapped_by[rank.wire] = rank.pid;
    for (auto& [number, window] : windows_)
      for (const uint64_t each : rank.closed) window.mapped_by.erase(each);
  }
  own.connected = true;
  return unmapped();
}

void Windows::know(uint64_t wire, std::span<const Bytes> announcements) {
  const std::vector<Announced> all = read(announcements);
  const std::lock_guard lock(mutex_);
  for (const Announced& own : all) {
    if (own.wire != wire) continue;
    for (const uint64_t each : own.closed)
      if (const auto found = closed_.find(each); found != closed_.end())
        for (const Announced& rank : all)
          if (rank.is_here) found->second.erase(rank.pid);
  }
}

void Windows::close(uint64_t wire) {
  std::vector<Memory> freed;  // after the lock
  const std::lock_guard lock(mutex_);
  const auto found = windows_.find(wire);
  if (found == windows_.end() || found->second.closed) return;
  found->second.closed = true;
  closed_[wire] = found->second.peers;
  for (auto& [number, window] : windows_) window.mapped_by.erase(wire);  // of ranks as threads
  freed = unmapped();
}

std::vector<Memory> Windows::unmapped() {
  for (auto& [wire, untold] : closed_)
    std::erase_if(untold, [](const auto& process) { return !process.second->alive(); });
  std::erase_if(closed_, [](const auto& each) { return each.second.empty(); });
  std::vector<Memory> freed;
  for (auto& [wire, window] : windows_) {
    std::erase_if(window.mapped_by, [&peers = window.peers](const auto& each) {
      const auto process = peers.find(each.second);
      return process != peers.end() && !process->second->alive();
    });
    if (window.is_free()) freed.push_back(std::move(window.memory));
  }
  std::erase_if(windows_, [](const auto& each) { return each.second.is_free(); });
  return freed;
}

}  // namespace cgx::device
