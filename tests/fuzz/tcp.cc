// What a connection of TCP brings before and after it is proven: any bytes, or a rank's own that
// were spoiled.
//
//   handshake  nobody is proven who does not know the key, and no more is read than it awaits
//   frames     any stream, cut anywhere: frames are what the stream has at their place, or an Error
#include <cstring>

#include "base/status.h"
#include "input.h"
#include "transport/tcp_frames.h"
#include "transport/tcp_handshake.h"

using namespace cgx;

namespace {

constexpr SipKey kKey{0x1234, 0x5678}, kForeignKey{0x1234, 0x5679};

// The other side answers without the key, or spoils what was said with it.
void meet(Input& input) {
  const bool dials = input.flag(), knows = input.flag();
  auto ours = dials ? Handshake::dial(kKey, 2, 1) : Handshake::accept(kKey, 2, 4);
  const SipKey& key = knows ? kKey : kForeignKey;
  auto theirs = dials ? Handshake::accept(key, 1, 4) : Handshake::dial(key, 3, 2);
  Bytes said = dials ? theirs.opening() : theirs.take(ours.opening());
  bool spoiled = false;
  while (ours.state() == Handshake::State::kGoing) {
    Bytes heard = input.below(4) == 0 ? input.bytes(ours.awaits()) : input.spoiled(said);
    heard.resize(ours.awaits());  // a connection gives exactly that many
    spoiled |= heard != said;
    const Bytes answer = ours.take(heard);
    said = answer.size() == theirs.awaits() ? theirs.take(answer) : Bytes();
    said.resize(ours.awaits());
  }
  FUZZ_CHECK((ours.state() == Handshake::State::kProven) == (knows && !spoiled));
  FUZZ_CHECK(ours.awaits() == 0);
}

// A frame longer than this never comes whole here. Its block is not asked for: AddressSanitizer
// marks every byte of it, which takes milliseconds for gigabytes.
constexpr uint32_t kLongestAnnounced = 1 << 17;

bool announces_too_much(std::span<const std::byte> stream) {
  FrameHeader header;
  if (stream.size() < sizeof(header)) return false;
  std::memcpy(&header, stream.data(), sizeof(header));
  return header.size > kLongestAnnounced;
}

void read_stream(Input& input) {
  BlockPool blocks;
  FrameReader reader(&blocks);
  static Bytes stream;  // all that was received; the memory is every input's
  stream.clear();
  size_t taken = 0;                                         // of it, as frames
  std::vector<std::pair<FrameReader::Frame, size_t>> held;  // and where their payload was
  const auto unchanged = [&](const FrameReader::Frame& frame, size_t at) {
    FUZZ_CHECK(std::memcmp(frame.payload.data(), stream.data() + at, frame.payload.size()) == 0);
  };
  while (!input.empty() && stream.size() < 160'000) {
    Bytes part;
    if (input.below(4) != 0) {  // a frame that can be; some are longer than a block
      const uint32_t size = input.below(64) == 0 ? 70'000 : input.number<uint8_t>();
      const FrameHeader header{size, FrameHeader::kBulk, input.number<uint8_t>(), 1};
      part = to_bytes(header);
      part.resize(part.size() + size + frame_padding(size));
      part = input.spoiled(part);
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
      while (auto frame = reader.next()) {
        FUZZ_CHECK(std::memcmp(&frame->header, stream.data() + taken, sizeof(FrameHeader)) == 0);
        FUZZ_CHECK(frame->payload.size() == frame->header.size);
        const size_t payload = taken + sizeof(FrameHeader);
        taken = payload + frame->payload.size() + frame_padding(frame->payload.size());
        FUZZ_CHECK(taken <= stream.size());
        unchanged(*frame, payload);
        if (input.flag()) held.emplace_back(std::move(*frame), payload);
      }
      if (announces_too_much(std::span(stream).subspan(taken))) return;
    }
  }
  for (const auto& [frame, payload] : held) unchanged(frame, payload);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  try {
    input.flag() ? meet(input) : read_stream(input);
  } catch (const Error&) {
  }
  return 0;
}
