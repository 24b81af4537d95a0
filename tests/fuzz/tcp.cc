// The bytes of a TCP connection during and after the handshake: any bytes, or corrupted messages of
// a rank.
//
//   handshake  a peer without the key is not authenticated, and only the expected length is read
//   frames     a stream of any bytes in any pieces: frames equal the stream's bytes, or an Error
#include <cstring>

#include "base/status.h"
#include "input.h"
#include "transport/tcp_frames.h"
#include "transport/tcp_handshake.h"

using namespace cgx;

namespace {

constexpr SipKey kKey{0x1234, 0x5678}, kForeignKey{0x1234, 0x5679};

// The peer answers without the key, or with corrupted messages.
void run_handshake(Input& input) {
  const bool dials = input.flag(), has_key = input.flag();
  auto ours = dials ? Handshake::dial(kKey, 2, 1) : Handshake::accept(kKey, 2, 4);
  const SipKey& key = has_key ? kKey : kForeignKey;
  auto theirs = dials ? Handshake::accept(key, 1, 4) : Handshake::dial(key, 3, 2);
  Bytes sent = dials ? theirs.opening() : theirs.take(ours.opening());
  bool corrupted = false;
  while (ours.state() == Handshake::State::kGoing) {
    Bytes received = input.below(4) == 0 ? input.bytes(ours.awaits()) : input.corrupted(sent);
    received.resize(ours.awaits());  // a connection reads exactly this length
    corrupted |= received != sent;
    const Bytes answer = ours.take(received);
    sent = answer.size() == theirs.awaits() ? theirs.take(answer) : Bytes();
    sent.resize(ours.awaits());
  }
  FUZZ_CHECK((ours.state() == Handshake::State::kProven) == (has_key && !corrupted));
  FUZZ_CHECK(ours.awaits() == 0);
}

// A longer frame never arrives completely in this test. It is not read, since AddressSanitizer
// marks every byte of its block, which takes milliseconds for gigabytes.
constexpr uint32_t kLongestAnnounced = 1 << 17;

bool next_frame_is_too_long(std::span<const std::byte> stream) {
  FrameHeader header;
  if (stream.size() < sizeof(header)) return false;
  std::memcpy(&header, stream.data(), sizeof(header));
  return header.size > kLongestAnnounced;
}

void read_stream(Input& input) {
  BlockPool blocks;
  FrameReader reader(&blocks);
  static Bytes stream;  // all received bytes; static, to reuse the memory
  stream.clear();
  size_t taken = 0;      // bytes of `stream` that were returned as frames
  bool extracts = true;  // after an error, a connection is read on without extracting frames
  std::vector<std::pair<FrameReader::Frame, size_t>> held;  // with the payloads' offsets
  const auto unchanged = [&](const FrameReader::Frame& frame, size_t at) {
    FUZZ_CHECK(std::memcmp(frame.payload.data(), stream.data() + at, frame.payload.size()) == 0);
  };
  while (!input.empty() && stream.size() < 160'000) {
    Bytes part;
    if (input.below(4) != 0) {  // a valid frame; some are longer than a block
      const uint32_t size = input.below(64) == 0 ? 70'000 : input.number<uint8_t>();
      const FrameHeader header{size, FrameHeader::kBulk, input.number<uint8_t>(), 1};
      part = to_bytes(header);
      part.resize(part.size() + size + frame_padding(size));
      part = input.corrupted(part);
    } else {
      part = input.bytes(input.below(64));
    }
    for (size_t at = 0; at < part.size();) {
      const std::span<std::byte> room = reader.room();
      FUZZ_CHECK(!room.empty());
      const size_t piece = size_t{1 << 16} >> input.below(17);
      const size_t count = std::min({room.size(), part.size() - at, piece});
      std::memcpy(room.data(), part.data() + at, count);
      reader.filled(count);
      stream.insert(stream.end(), part.begin() + at, part.begin() + at + count);
      at += count;
      extracts = extracts && input.below(256) != 0;
      while (auto frame = extracts ? reader.next() : std::nullopt) {
        FUZZ_CHECK(std::memcmp(&frame->header, stream.data() + taken, sizeof(FrameHeader)) == 0);
        FUZZ_CHECK(frame->payload.size() == frame->header.size);
        const size_t payload = taken + sizeof(FrameHeader);
        taken = payload + frame->payload.size() + frame_padding(frame->payload.size());
        FUZZ_CHECK(taken <= stream.size());
        unchanged(*frame, payload);
        if (input.flag()) held.emplace_back(std::move(*frame), payload);
      }
      if (next_frame_is_too_long(std::span(stream).subspan(taken))) return;
    }
  }
  for (const auto& [frame, payload] : held) unchanged(frame, payload);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  try {
    input.flag() ? run_handshake(input) : read_stream(input);
  } catch (const Error&) {
  }
  return 0;
}
