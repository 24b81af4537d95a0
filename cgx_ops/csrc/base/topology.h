// Which ranks of a communicator share a host. Index arithmetic only.
//
// Hosts are numbered in the order of their first ranks. Lane l consists of the l-th rank of every
// host. There are as many lanes as the smallest host has ranks, so that each lane spans all hosts.
// Further ranks of larger hosts are in no lane.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace cgx {

class Topology {
 public:
  // host_of[rank] is the number of the rank's host.
  explicit Topology(std::vector<int> host_of) : host_of_(std::move(host_of)) {
    for (int rank = 0; rank < static_cast<int>(host_of_.size()); ++rank) {
      const auto host = static_cast<size_t>(host_of_[rank]);
      if (host == ranks_of_.size()) ranks_of_.emplace_back();
      local_ranks_.push_back(static_cast<int>(ranks_of_[host].size()));
      ranks_of_[host].push_back(rank);
    }
    const auto fewer = [](const auto& a, const auto& b) { return a.size() < b.size(); };
    const auto [smallest, largest] = std::minmax_element(ranks_of_.begin(), ranks_of_.end(), fewer);
    lanes_ = static_cast<int>(smallest->size());
    nested_ = hosts() > 1 && largest->size() > 1;
  }

  int size() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(ranks_of_.size()); }
  int lanes() const { return lanes_; }
  // Whether there are several hosts, at least one of them with several ranks.
  bool nested() const { return nested_; }

  int host_of(int rank) const { return host_of_[rank]; }
  // The rank's number on its host, from 0. Also its lane, if it is less than lanes().
  int local_rank(int rank) const { return local_ranks_[rank]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[host]; }
  // There is a shard per host and lane, numbered host by host.
  int shard_of(int host, int lane) const { return host * lanes_ + lane; }

 private:
  std::vector<int> host_of_, local_ranks_;
  std::vector<std::vector<int>> ranks_of_;
  int lanes_ = 1;
  bool nested_ = false;
};

// Numbers hosts in the order of their first ranks. Host is any type that compares equal on one
// host.
template <typename Host>
std::vector<int> number_hosts(const std::vector<Host>& hosts) {
  std::vector<Host> known;
  std::vector<int> numbers;
  for (const Host& host : hosts) {
    const auto found = std::find(known.begin(), known.end(), host);
    numbers.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(host);
  }
  return numbers;
}

}  // namespace cgx
