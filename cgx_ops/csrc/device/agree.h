// A step that succeeds on all ranks or is abandoned on all ranks.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "device/host_link.h"

namespace cgx::device {

// Runs `step`, which returns a blob or throws, and exchanges the outcomes under the key `what`.
// Returns true on all ranks, with their blobs, if all succeeded. Otherwise returns false on all
// ranks, with the first failed rank and its error in *why.
template <typename Step>
bool all_succeed(HostLink& host, const std::string& what, std::chrono::duration<double> timeout,
                 const Step& step, std::vector<Bytes>* blobs, std::string* why) {
  constexpr size_t kMostText = 1000;
  Bytes message(1);  // 1 and the blob, or 0 and the error
  try {
    const Bytes blob = step();
    message[0] = std::byte{1};
    message.insert(message.end(), blob.begin(), blob.end());
  } catch (const std::exception& error) {
    const std::string text = cut(error.what(), kMostText);
    message.resize(1 + text.size());
    std::memcpy(message.data() + 1, text.data(), text.size());
  }
  std::vector<Bytes> all = host.exchange(what, message, timeout);
  blobs->clear();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    require(!all[rank].empty(), CGX_PEER_FAILED, "rank ", rank, " sent an empty message for ",
            what);
    const Bytes rest(all[rank].begin() + 1, all[rank].end());
    if (all[rank][0] == std::byte{0}) {
      *why = join("rank ", rank, ": ",
                  std::string(reinterpret_cast<const char*>(rest.data()), rest.size()));
      return false;
    }
    blobs->push_back(rest);
  }
  return true;
}

}  // namespace cgx::device
