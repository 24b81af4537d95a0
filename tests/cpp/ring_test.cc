// The ring of frames in shared memory: order, wrap-around, a full ring, and two threads.
#include "transport/ring.h"

#include <memory>
#include <numeric>
#include <random>

#include "ranks.h"

namespace {

using cgx::Ring;

std::vector<std::byte> frame_of(int index) {
  std::mt19937 random(index);
  std::vector<std::byte> frame(random() % 20000);
  for (auto& byte : frame) byte = static_cast<std::byte>(random());
  return frame;
}

void test_full_ring() {
  auto ring = std::make_unique<Ring>();
  const std::vector<std::byte> frame(16 * 1024);
  int pushed = 0;
  while (ring->push(1, frame)) ++pushed;
  CHECK(pushed == 3, "%d frames of 16 KB in 64 KB, with their prefixes", pushed);
  uint32_t type;
  std::vector<std::byte> body;
  CHECK(ring->pop(&type, &body) == Ring::Popped::kFrame && ring->push(2, frame),
        "no room after a frame was popped");
}

// A faulty writer: lengths that the ring cannot hold.
void test_malformed_frames() {
  uint32_t type;
  std::vector<std::byte> body;
  for (const uint32_t size : {9u, 1u << 16, UINT32_MAX - 3}) {
    auto ring = std::make_unique<Ring>();
    CHECK(ring->pop(&type, &body) == Ring::Popped::kNothing, "the ring is not empty");
    ring->push(1, std::vector<std::byte>(8));
    std::memcpy(ring->bytes, &size, sizeof(size));
    CHECK(ring->pop(&type, &body) == Ring::Popped::kMalformed, "a frame of %u bytes", size);
  }
  for (const uint64_t written : {uint64_t{7}, uint64_t{Ring::kCapacity + 8}, ~uint64_t{0}}) {
    auto ring = std::make_unique<Ring>();
    ring->written = written;
    CHECK(ring->pop(&type, &body) == Ring::Popped::kMalformed, "%lu bytes written", written);
  }
}

void test_two_threads() {
  constexpr int kFrames = 3000;
  auto ring = std::make_unique<Ring>();
  std::thread writer([&] {
    for (int i = 0; i < kFrames; ++i) {
      const auto frame = frame_of(i);
      while (!ring->push(static_cast<uint32_t>(i), frame)) std::this_thread::yield();
    }
  });
  for (int i = 0; i < kFrames; ++i) {
    uint32_t type;
    std::vector<std::byte> body;
    while (ring->pop(&type, &body) != Ring::Popped::kFrame) std::this_thread::yield();
    CHECK(type == static_cast<uint32_t>(i) && body == frame_of(i), "frame %d", i);
  }
  writer.join();
}

}  // namespace

int main() {
  test_full_ring();
  test_malformed_frames();
  test_two_threads();
  std::puts("passed");
}
