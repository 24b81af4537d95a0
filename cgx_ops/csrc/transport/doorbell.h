// A doorbell (futex): a word that a rank sleeps on and its peers ring, across threads or processes.
//
// The sleeper reads the count, polls for work once more, then sleeps only while the count is
// unchanged. A ringer publishes its work, then increments the count. So no ring is lost, and
// ringing an awake rank needs no system call.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace cgx {

struct Doorbell {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> sleepers{0};

  void ring() {
    count.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps while count == seen.
  void sleep(uint32_t seen, std::chrono::microseconds at_most) {
    const timespec limit{static_cast<time_t>(at_most.count() / 1000000),
                         static_cast<long>(at_most.count() % 1000000) * 1000};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (count.load(std::memory_order_seq_cst) == seen)
      syscall(SYS_futex, &count, FUTEX_WAIT, seen, &limit, nullptr, 0);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

}  // namespace cgx
