// A step that either all ranks have done, or none goes on from.
#pragma once

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/status.h"
#include "device/host_link.h"

namespace cgx::device {

// Does `step`, which returns a blob or throws, and exchanges what came of it, as `what`. True: all
// ranks' blobs are in *blobs. False, on all ranks: *why has who failed first, and with which words.
template <typename Step>
bool all_succeed(HostLink& host, const std::string& what, std::chrono::duration<double> timeout,
                 const Step& step, std::vector<Bytes>* blobs, std::string* why) {
  constexpr size_t kMostText = 1000;
  Bytes message(1);  // 1 and the blob, or 0 and the reason
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
    require(!all[rank].empty(), CGX_PEER_FAILED, "rank ", rank, " sent nothing for ", what);
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
