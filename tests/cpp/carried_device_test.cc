// The steps of an allreduce whose messages the caller sends (cgx.h, section 5) on simulated devices
// (fake_device.h). Messages, results and residuals must be bitwise equal to those of the steps on
// CPUs.
//
//   1. the exchange
//   2. cases
//   3. invalid calls
#include "device/carried.h"
#include "device_cases.h"

namespace cgx {
namespace {

using Buffer = std::vector<std::byte>;

constexpr auto kGarbage = std::byte{0xa5};
constexpr int64_t kPadding = 13;  // bytes of a buffer after its messages

// ---- 1. the exchange -----------------------------------------------------------------------

// One rank's call, and its steps on the CPU or a device. Buffers of messages begin as garbage.
class Side {
 public:
  Side(const Case& one, int rank, int size, bool on_device)
      : rank_(one, rank, size), stream_(rank), on_device_(on_device) {
    if (on_device) {
      rank_.use(stream_);
    } else {
      rank_.use_cpu();
    }
    made_ = std::make_unique<Carried>(rank_.call, rank, size, BuffersUsed{});
    if (on_device) steps_ = std::make_unique<device::CarriedSteps>(*made_);
  }

  const Carried& made() const { return *made_; }
  Buffer result() const { return rank_.result(); }

  Buffer encode() {
    Buffer messages(made_->encoded_at().back() + kPadding, kGarbage);
    if (on_device_) {
      steps_->encode(stream_, messages);
      stream_.synchronize();
    } else {
      made_->encode(messages);
    }
    return messages;
  }
  Buffer reduce(const Buffer& arrived, int64_t bytes) {
    Buffer message(bytes, kGarbage);
    if (on_device_) {
      steps_->reduce(stream_, arrived, message);
      stream_.synchronize();
    } else {
      made_->reduce(arrived, message);
    }
    return message;
  }
  void decode(const Buffer& gathered) {
    if (on_device_) {
      steps_->decode(stream_, gathered);
      stream_.synchronize();
    } else {
      made_->decode(gathered);
    }
  }

 private:
  Rank rank_;
  FakeQueue stream_;
  const bool on_device_;
  std::unique_ptr<Carried> made_;
  std::unique_ptr<device::CarriedSteps> steps_;
};

// The messages and results of all ranks.
struct Outcome {
  std::vector<Buffer> scattered;  // from rank i to rank j, at i * size + j
  std::vector<Buffer> gathered;   // one per rank, padded to equal lengths
  std::vector<Buffer> results;
  bool operator==(const Outcome&) const = default;
};

Outcome allreduce(const Case& one, int size, bool on_device) {
  std::vector<std::unique_ptr<Side>> sides;
  for (int rank = 0; rank < size; ++rank)
    sides.push_back(std::make_unique<Side>(one, rank, size, on_device));
  const Carried& made = sides[0]->made();
  int64_t longest = 0;
  for (int rank = 0; rank < size; ++rank) longest = std::max(longest, made.gather_bytes(rank));
  longest += kPadding;

  Outcome outcome;
  std::vector<Buffer> encoded;
  for (auto& side : sides) encoded.push_back(side->encode());
  const auto part = [&](const Buffer& all, const std::vector<int64_t>& at, int rank) {
    return Buffer(all.begin() + at[rank], all.begin() + at[rank + 1]);
  };
  for (int rank = 0; rank < size; ++rank) {
    Buffer& buffer = encoded[rank];
    const Buffer rest(buffer.end() - kPadding, buffer.end());
    CHECK(size == 1 || rest == Buffer(kPadding), "the end of rank %d's messages is not cleared",
          rank);
    if (made.one_shot()) {
      buffer.resize(longest, std::byte{0});
      outcome.gathered.push_back(buffer);
      continue;
    }
    for (int owner = 0; owner < size; ++owner) {
      Buffer message = part(buffer, sides[rank]->made().encoded_at(), owner);
      if (owner == rank) {
        CHECK(std::all_of(message.begin(), message.end(),
                          [](std::byte b) { return b == std::byte{}; }),
              "rank %d's message to itself is not cleared", rank);
        message.clear();
      }
      outcome.scattered.push_back(message);
    }
  }
  if (!made.one_shot())
    for (int rank = 0; rank < size; ++rank) {
      const std::vector<int64_t> at = sides[rank]->made().arrived_at();
      Buffer arrived(at.back(), kGarbage);  // this rank's own message must not be read
      for (int peer = 0; peer < size; ++peer) {
        const Buffer& message = outcome.scattered[peer * size + rank];
        std::copy(message.begin(), message.end(), arrived.begin() + at[peer]);
      }
      outcome.gathered.push_back(sides[rank]->reduce(arrived, size == 1 ? 0 : longest));
    }
  Buffer all;
  for (const Buffer& message : outcome.gathered)
    all.insert(all.end(), message.begin(), message.end());
  for (auto& side : sides) {
    side->decode(all);
    outcome.results.push_back(side->result());
  }
  return outcome;
}

// ---- 2. cases ------------------------------------------------------------------------------

void cases_equal_the_cpus() {
  int64_t compared = 0;
  for (const int size : {1, 2, 3, 4, 8}) {
    int number = 0;
    for (const Case& one : cases()) {
      if (one.verb != CGX_ALLREDUCE || one.compressor == CGX_RANDK) continue;
      if (size > 3 && (++number % 3 != 0 || one.numels[0] > 100'000)) continue;
      CHECK(allreduce(one, size, false) == allreduce(one, size, true), "%d ranks differ: %s", size,
            one.text().c_str());
      ++compared;
    }
  }
  std::printf("%lld cases equal CPU results\n", static_cast<long long>(compared));
}

// Messages have the lengths of CPU calls, so that ranks on both kinds of devices can exchange them.
void lengths_are_equal() {
  Case one;
  one.numels = {3'000'000, 17, 700};
  one.algorithm = CGX_SRA;
  const Side cpu(one, 1, 3, false), gpu(one, 1, 3, true);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(cpu.made().scatter_bytes(rank) == gpu.made().scatter_bytes(rank), "rank %d", rank);
    CHECK(cpu.made().gather_bytes(rank) == gpu.made().gather_bytes(rank), "rank %d", rank);
  }
}

// ---- 3. invalid calls ----------------------------------------------------------------------

void unsupported_codecs() {
  const auto refused = [](const Case& one, const std::string& text) {
    throws(CGX_UNSUPPORTED, {text}, [&] { Side(one, 0, 2, true); });
  };
  Case one;
  one.compressor = CGX_RANDK;
  refused(one, "compressor='randk' is not supported on GPUs if the caller sends the messages");
  one = {};
  one.rotation = 64;
  one.bucket_size = 16'384;
  one.numels = {20'000};
  refused(one, "must fit shared memory, so use at most 8192");
}

void wrong_sizes() {
  Case one;
  one.algorithm = CGX_SRA;
  Side side(one, 0, 2, true);
  const int64_t bytes = side.made().arrived_at().back();
  throws(CGX_INVALID_ARGUMENT, {"arrived has", join("reports ", bytes)},
         [&] { side.reduce(Buffer(bytes - 1), 9000); });
  throws(CGX_INVALID_ARGUMENT, {"message has room for 3 bytes"},
         [&] { side.reduce(Buffer(bytes), 3); });
  throws(CGX_INVALID_ARGUMENT, {"gathered has 8 bytes"}, [&] { side.decode(Buffer(8)); });
}

}  // namespace
}  // namespace cgx

int main() {
  using namespace cgx;
  const FloatMode mode;
  cases_equal_the_cpus();
  lengths_are_equal();
  unsupported_codecs();
  wrong_sizes();
  std::puts("carried_device_test: passed");
}
