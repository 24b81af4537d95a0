#include "connect.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/bytes.h"
#include "base/env.h"
#include "base/hash.h"
#include "base/status.h"
#include "registry.h"
#include "transport/host.h"

namespace cgx {
namespace {

constexpr size_t kOfferBytes = 512;  // of one transport
constexpr size_t kReasonBytes = 400;
constexpr auto kNeedsUlfm =
    "this group may lose processes, and MPI connects the survivors only with ULFM (User Level "
    "Failure Mitigation), which cgx does not use: set COMMUNICATOR_TYPE to AUTO, SHM or TCP";

// The first blob of every rank. In all versions it has this size and begins with `version`, so that
// ranks of two versions can name both.
struct Hello {
  char version[32];
  char type[8];
  Host host;
  int64_t unread_bytes;  // as in Plan
  int32_t status;        // a cgx_status_t; not CGX_OK if this rank cannot take part
  char refusal[kReasonBytes];
  std::byte unused[380];
};
static_assert(sizeof(Hello) == 1024);

struct Offered {
  uint32_t bytes;  // 0: this rank does not support the transport
  std::byte offer[kOfferBytes];
  char refusal[kReasonBytes];  // the reason
};
struct Connected {
  int32_t status;  // a cgx_status_t
  char failure[kReasonBytes];
};

template <typename T>
std::vector<T> gather(const Allgather& allgather, const T& mine) {
  std::vector<T> all;
  for (const auto& bytes : allgather(to_bytes(mine)))
    all.push_back(from_bytes<T>(bytes, "a bootstrap's blob"));
  return all;
}

// The result of exchanging Hellos.
struct Greeted {
  std::shared_ptr<const Topology> topology;
  int64_t unread_bytes;  // the minimum over all ranks
};

// `refusal`: why this rank cannot take part, if it cannot.
Greeted exchange_hellos(const Allgather& allgather, const std::string& type, const Host& host,
                        int64_t unread_bytes, const std::optional<Error>& refusal) {
  Hello mine{};
  put_text(mine.version, CGX_VERSION);
  put_text(mine.type, type);
  mine.host = host;
  mine.unread_bytes = unread_bytes;
  if (refusal) {
    mine.status = refusal->status();
    put_text(mine.refusal, refusal->what());
  }
  const auto all = gather(allgather, mine);
  if (refusal) throw *refusal;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string version = text_of(all[rank].version), its_type = text_of(all[rank].type);
    require(version == CGX_VERSION, CGX_MISMATCH, "this rank runs cgx ", CGX_VERSION, ", rank ",
            rank, " cgx ", version, ": install the same version on all hosts");
    require(its_type == type, CGX_MISMATCH, "COMMUNICATOR_TYPE (or the transport argument) is ",
            type, " on this rank, but ", its_type, " on rank ", rank);
    require(all[rank].status == CGX_OK, CGX_SYSTEM, "rank ", rank,
            " cannot take part: ", text_of(all[rank].refusal));
  }
  std::vector<Host> hosts;
  for (const Hello& each : all) {
    hosts.push_back(each.host);
    unread_bytes = std::min(unread_bytes, each.unread_bytes);
  }
  return {std::make_shared<Topology>(number_hosts(hosts)), unread_bytes};
}

// Runs `work` and returns its exception, if any.
template <typename Work>
std::optional<Error> failure_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  } catch (const std::exception& error) {
    return Error(CGX_SYSTEM, error.what());
  }
  return std::nullopt;
}

// Tries one transport. Returns nullptr and the reason if it does not connect these ranks. A failure
// on this rank is sent to the others in the next exchange, so that all take the same steps.
std::unique_ptr<Transport> try_transport(const TransportEntry& entry, int rank, int size,
                                         const Allgather& allgather, Communicator::Seconds timeout,
                                         Communicator::Seconds at_most, std::string* why) {
  std::unique_ptr<Connector> connector;
  Offered mine{};
  const auto no_offer = failure_of([&] {
    connector = entry.make(rank, size);
    require(connector != nullptr, CGX_SYSTEM, "it is not initialized");
    const Bytes offer = connector->offer();
    require(offer.size() <= kOfferBytes, CGX_INTERNAL, "offer of ", offer.size(), " bytes");
    std::copy(offer.begin(), offer.end(), mine.offer);
    mine.bytes = static_cast<uint32_t>(offer.size());
  });
  if (no_offer) put_text(mine.refusal, no_offer->what());
  std::vector<Bytes> offers;
  const auto all = gather(allgather, mine);
  for (size_t peer = 0; peer < all.size(); ++peer) {
    const Offered& offered = all[peer];
    if (offered.bytes == 0 || offered.bytes > kOfferBytes) {
      *why = join("rank ", peer, ": ", text_of(offered.refusal));
      return nullptr;
    }
    offers.emplace_back(offered.offer, offered.offer + offered.bytes);
  }
  *why = connector->refusal(offers);
  if (!why->empty()) return nullptr;

  std::unique_ptr<Transport> transport;
  Connected result{};
  const Reach everyone{std::vector<bool>(size, true), at_most, timeout};
  const auto failure = failure_of([&] { transport = connector->connect(offers, everyone); });
  if (failure) {
    result.status = failure->status();
    put_text(result.failure, failure->what());
  }
  const auto results = gather(allgather, result);
  for (size_t peer = 0; peer < results.size(); ++peer) {
    if (results[peer].status == CGX_OK) continue;
    *why = join("rank ", peer, ": ", text_of(results[peer].failure));
    return nullptr;
  }
  return transport;
}

CommunicatorRef alone(const std::string& name, int noise_rank, Communicator::Seconds timeout) {
  const auto topology = std::make_shared<Topology>(std::vector<int>{0});
  return std::make_shared<Communicator>(name, 0, noise_rank, topology, "AUTO", timeout,
                                        env_fusion_buffer_bytes(), nullptr);
}

}  // namespace

CommunicatorRef connect(const std::string& name, int rank, int noise_rank, int size,
                        const Allgather& allgather, const std::string& type,
                        Communicator::Seconds timeout, bool elastic,
                        Communicator::Seconds at_most) {
  if (size == 1) {
    (void)env_timeout_seconds();
    return alone(name, noise_rank, timeout);
  }
  if (at_most <= Communicator::Seconds(0)) at_most = timeout;
  int64_t unread_bytes = 0;
  Host host{};
  const auto refusal = failure_of([&] {
    Registry::instance().require_free(name);
    unread_bytes = env_fusion_buffer_bytes();
    (void)env_timeout_seconds();  // validates it even if the caller passes a timeout
    host = this_host();
  });
  const Greeted greeted = exchange_hellos(allgather, type, host, unread_bytes, refusal);
  std::string tried;
  const bool any = type == "AUTO" || type == "NCCL";  // NCCL applies to GPUs only
  for (const auto& entry : transport_table()) {
    if (!any && type != entry.communicator_type) continue;
    std::string why = kNeedsUlfm;
    std::unique_ptr<Transport> transport;
    if (!elastic || entry.elastic)
      transport = try_transport(entry, rank, size, allgather, timeout, at_most, &why);
    if (transport)
      return std::make_shared<Communicator>(name, rank, noise_rank, greeted.topology, type, timeout,
                                            greeted.unread_bytes, std::move(transport), elastic);
    tried += join("; ", entry.name, ": ", why);
  }
  fail(CGX_UNSUPPORTED, "no transport connects the ", size, " ranks of communicator '", name,
       "' (COMMUNICATOR_TYPE ", type, ")", tried);
}

std::vector<CommunicatorRef> connect_local(const std::string& name, std::vector<int> host_of,
                                           Communicator::Seconds timeout, const std::string& type) {
  const auto topology = std::make_shared<Topology>(std::move(host_of));
  const int size = topology->size();
  if (size == 1) return {alone(name + "/0", /*noise_rank=*/0, timeout)};
  const int64_t unread_bytes = env_fusion_buffer_bytes();
  std::vector<CommunicatorRef> communicators;
  std::vector<std::unique_ptr<Connector>> connectors;
  std::vector<Bytes> offers;
  for (int rank = 0; rank < size; ++rank) {
    connectors.push_back(make_thread_connector(rank, size));
    offers.push_back(connectors.back()->offer());
  }
  const Reach everyone{std::vector<bool>(size, true), timeout};
  for (int rank = 0; rank < size; ++rank)
    communicators.push_back(std::make_shared<Communicator>(
        join(name, "/", rank), rank, /*noise_rank=*/rank, topology, type, timeout, unread_bytes,
        connectors[rank]->connect(offers, everyone)));
  return communicators;
}

CommunicatorRef split(Communicator& parent, int color, int key, const std::string& name) {
  check_name(name);
  struct Choice {
    int32_t color, key;
  };
  std::vector<int> everyone(parent.size);
  for (int rank = 0; rank < parent.size; ++rank) everyone[rank] = rank;
  const auto blobs = parent.exchange(everyone, internal_key(name, "split"),
                                     to_bytes(Choice{color, key}), parent.timeout);
  if (color < 0) return nullptr;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int rank = 0; rank < parent.size; ++rank) {
    const auto choice = from_bytes<Choice>(blobs[rank], "a choice of color");
    if (choice.color == color) members.emplace_back(choice.key, rank);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [order, rank] : members) ranks.push_back(rank);
  return group(parent, ranks, name);
}

CommunicatorRef group(Communicator& parent, const std::vector<int>& ranks,
                      const std::string& name) {
  check_name(name);
  std::string list;
  for (const int rank : ranks) {
    require(rank >= 0 && rank < parent.size, CGX_INVALID_ARGUMENT, "rank ", rank,
            " is not in communicator '", parent.name, "' of size ", parent.size);
    require(std::count(ranks.begin(), ranks.end(), rank) == 1, CGX_INVALID_ARGUMENT, "rank ", rank,
            " is listed twice: list each rank once");
    list += join(list.empty() ? "" : ",", rank);
  }
  const auto self = std::find(ranks.begin(), ranks.end(), parent.rank);
  require(self != ranks.end(), CGX_INVALID_ARGUMENT, "this rank, ", parent.rank,
          ", is not in the list [", list, "]: only listed ranks may call");
  // Ranks that are threads share the registry, so their communicators need different names.
  const std::string own =
      std::string(parent.transport_name()) == "thread" ? join(name, "/", parent.rank) : name;
  // The list is part of the key, because other ranks may be creating another group of the same
  // name.
  const uint64_t hash = fnv1a(std::as_bytes(std::span(list)));
  const std::string key = internal_key(join(name, "#", hash), "group");
  const Allgather allgather = [&](const Bytes& mine) {
    return parent.exchange(ranks, key, mine, parent.timeout);
  };
  return connect(own, static_cast<int>(self - ranks.begin()), parent.noise_rank,
                 static_cast<int>(ranks.size()), allgather, env_transport(), parent.timeout,
                 parent.elastic);
}

}  // namespace cgx
