#include "communicator.h"

#include <algorithm>
#include <cstring>

#include "algorithm/chunks.h"
#include "algorithm/exchange.h"
#include "algorithm/refusal.h"
#include "base/env.h"
#include "base/status.h"
#include "device/rounds.h"
#include "transport/host.h"

namespace cgx {
namespace {

constexpr size_t kLongestCommunicatorName = 512;  // making one adds to it, below kLongestName
constexpr size_t kMostBlobBytes = 4096;
constexpr size_t kOfferBytes = 320;  // of one transport
constexpr size_t kReasonBytes = 240;
constexpr size_t kLongestRefusal = 512;  // with the name, within what every transport carries

template <size_t N>
void put_text(char (&field)[N], const std::string& text) {
  std::memset(field, 0, N);
  std::memcpy(field, text.data(), std::min(text.size(), N - 1));
}

template <typename T>
Bytes to_bytes(const T& value) {
  Bytes bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

template <typename T>
T from_bytes(const Bytes& bytes) {
  T value;
  require(bytes.size() == sizeof(T), CGX_INTERNAL, "a bootstrap blob has ", bytes.size(),
          " bytes instead of ", sizeof(T));
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// What every rank says first.
struct Hello {
  char version[32];
  char type[8];
  Host host;
};
struct Offered {
  uint32_t bytes;  // 0: this rank cannot serve the transport
  std::byte offer[kOfferBytes];
};
struct Connected {
  char failure[kReasonBytes];  // "" when it worked
};

template <typename T>
std::vector<T> gather(const Allgather& allgather, const T& mine) {
  std::vector<T> all;
  for (const auto& bytes : allgather(to_bytes(mine))) all.push_back(from_bytes<T>(bytes));
  return all;
}

std::shared_ptr<const Topology> exchange_hellos(const Allgather& allgather,
                                                const std::string& type) {
  Hello mine;
  put_text(mine.version, CGX_VERSION);
  put_text(mine.type, type);
  mine.host = this_host();
  const auto all = gather(allgather, mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    require(std::string(all[rank].version) == all[0].version, CGX_MISMATCH, "rank 0 runs cgx ",
            all[0].version, ", rank ", rank, " cgx ", all[rank].version,
            ": install one version on all hosts");
    require(std::string(all[rank].type) == all[0].type, CGX_MISMATCH,
            "COMMUNICATOR_TYPE (or the transport asked for) is ", all[0].type, " on rank 0, ",
            all[rank].type, " on rank ", rank);
  }
  std::vector<Host> hosts;
  for (const Hello& each : all) hosts.push_back(each.host);
  return std::make_shared<Topology>(number_hosts(hosts));
}

// One transport: nullptr and why, if these ranks cannot have it.
std::unique_ptr<Transport> try_transport(const TransportEntry& entry, int rank, int size,
                                         const Allgather& allgather, Communicator::Seconds timeout,
                                         std::string* why) {
  auto connector = entry.make(rank, size);
  Offered mine{};
  if (connector) {
    const Bytes offer = connector->offer();
    require(offer.size() <= kOfferBytes, CGX_INTERNAL, "offer of ", offer.size(), " bytes");
    mine.bytes = static_cast<uint32_t>(offer.size());
    std::memcpy(mine.offer, offer.data(), offer.size());
  }
  std::vector<Bytes> offers;
  const auto all = gather(allgather, mine);
  for (size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].bytes == 0) {
      *why = join("rank ", peer, " has not started it");
      return nullptr;
    }
    offers.emplace_back(all[peer].offer, all[peer].offer + all[peer].bytes);
  }
  *why = connector->refusal(offers);
  if (!why->empty()) return nullptr;

  std::unique_ptr<Transport> transport;
  Connected result{};
  try {
    transport = connector->connect(offers, timeout);
  } catch (const std::exception& error) {
    put_text(result.failure, error.what());
  }
  const auto results = gather(allgather, result);
  for (size_t peer = 0; peer < results.size(); ++peer) {
    if (results[peer].failure[0] == '\0') continue;
    *why = join("rank ", peer, ": ", results[peer].failure);
    return nullptr;
  }
  return transport;
}

void check_name(const std::string& name) {
  require(!name.empty(), CGX_INVALID_ARGUMENT, "a communicator needs a name");
  require(name.size() <= kLongestCommunicatorName, CGX_INVALID_ARGUMENT, "the name has ",
          name.size(), " bytes; at most ", kLongestCommunicatorName);
}

void require_success(const Collective& collective) {
  require(collective.status == CGX_OK, collective.status, collective.error);
}

// The parent's name keeps keys of communicator making apart from those of users' collectives.
std::string making(const std::string& name, const std::string& what) {
  return join("\x01", what, ":", name);
}

// What a group of devices sees of its communicator.
class Link final : public device::HostLink {
 public:
  explicit Link(Communicator* communicator) : communicator_(*communicator) {
    for (int rank = 0; rank < communicator_.size; ++rank) everyone_.push_back(rank);
  }
  const std::string& name() const override { return communicator_.name; }
  int rank() const override { return communicator_.rank; }
  int size() const override { return communicator_.size; }
  std::vector<Bytes> exchange(const std::string& what, const Bytes& mine,
                              Communicator::Seconds timeout) override {
    return communicator_.exchange(everyone_, making("", what), mine, timeout);
  }
  void start(std::unique_ptr<Algorithm> algorithm, const std::string& what, uint64_t number,
             const Agreement& agreement, Communicator::Seconds timeout, cgx_callback_t callback,
             void* context) override {
    communicator_.start(std::move(algorithm), what, number, agreement, timeout, callback, context);
  }

 private:
  Communicator& communicator_;
  std::vector<int> everyone_;
};

void require_device(const cgx_collective_t& call, cgx_device_t device, const char* instead) {
  require(call.device == device, CGX_INVALID_ARGUMENT, "device is ", call.device,
          call.device == CGX_CPU    ? " (CPU)"
          : call.device == CGX_CUDA ? " (CUDA)"
                                    : "",
          ": ", instead);
}

// A host's or a freed address would break the device for the whole process.
void check_addresses(const cgx_collective_t& call, device::Device& device) {
  const auto check = [&](const void* address, const std::string& what) {
    if (address) device.check_address(address, what);
  };
  const auto check_list = [&](const void* const* list, const char* what) {
    for (int64_t i = 0; list && i < call.num_segments; ++i) check(list[i], join(what, "[", i, "]"));
  };
  check(call.input, "input");
  check(call.output, "output");
  check(call.device_seeds, "device_seeds");
  check_list(call.inputs, "inputs");
  check_list(call.outputs, "outputs");
  check_list(call.errors, "errors");
}

}  // namespace

// ---- Communicator --------------------------------------------------------------------------

Communicator::Communicator(std::string name, int rank, std::shared_ptr<const Topology> topology,
                           std::string type, Seconds timeout, std::unique_ptr<Transport> transport)
    : name(std::move(name)),
      rank(rank),
      size(topology->size()),
      topology(std::move(topology)),
      type(std::move(type)),
      timeout(timeout),
      engine_(transport ? std::make_unique<Engine>(this->name, rank, size, std::move(transport))
                        : nullptr),
      chunk_bytes_(engine_ ? transport_entry(engine_->transport_name()).chunk_bytes : kChunkBytes),
      link_(std::make_unique<Link>(this)) {}

Communicator::~Communicator() { close(); }

std::shared_ptr<Collective> Communicator::start(const cgx_collective_t& call,
                                                cgx_callback_t callback, void* context) {
  auto collective = prepare(call);
  if (engine_) {
    collective->callback = callback;
    collective->context = context;
    engine_->submit(collective);
  } else {
    copy_through(call, *collective);
    if (callback) notify(*collective, callback, context);
  }
  return collective;
}

void Communicator::notify(Collective& collective, cgx_callback_t callback, void* context) {
  require(!collective.notified.exchange(true), CGX_INVALID_ARGUMENT, "a callback was given for ",
          "this request already; call several from one");
  if (engine_ && engine_->notify(collective, callback, context)) return;
  collective.calling_back = true;
  callback(context, collective.status, collective.error.c_str());
  collective.calling_back = false;
  collective.calling_back.notify_all();
}

void Communicator::run(const cgx_collective_t& call) {
  const auto collective = prepare(call);
  if (engine_) {
    engine_->run(collective);
    require_success(*collective);
  } else {
    copy_through(call, *collective);
  }
}

void Communicator::refuse(const cgx_collective_t& call, cgx_status_t status,
                          const std::string& message) {
  if (!engine_) return;
  auto collective = named(call);
  collective->counts = false;
  collective->refusal = {status, message.substr(0, kLongestRefusal)};
  collective->algorithm = std::make_unique<Refusal>();
  engine_->submit(collective);
}

void Communicator::wait(Collective& collective) {
  if (engine_) engine_->wait(collective);
  collective.calling_back.wait(true);
  require_success(collective);
}

Plan Communicator::plan(const cgx_collective_t& call) const {
  Plan made = make_plan(call, rank, size);
  made.topology = topology;
  made.chunk_bytes = chunk_bytes_;
  made.algorithm = pick_algorithm(made);
  return made;
}

std::shared_ptr<Collective> Communicator::named(const cgx_collective_t& call) const {
  auto collective = std::make_shared<Collective>();
  collective->name = call.name ? call.name : "";
  require(collective->name.size() <= kLongestName, CGX_INVALID_ARGUMENT, "the name has ",
          collective->name.size(), " bytes; at most ", kLongestName);
  collective->occurrence = call.occurrence;
  collective->timeout =
      call.timeout_s > 0 ? Seconds(std::min(call.timeout_s, kLongestTimeout)) : timeout;
  for (int member = 0; member < size; ++member) collective->members.push_back(member);
  return collective;
}

std::shared_ptr<Collective> Communicator::prepare(const cgx_collective_t& call) const {
  require_device(call, CGX_CPU, "cgx_start and cgx_run are for the CPU; use cgx_enqueue");
  Plan made = plan(call);
  auto collective = named(call);
  collective->agreement = make_agreement(call, made);
  const int64_t bytes = made.bytes(collective->agreement.numel);
  collective->bytes_in = made.verb == CGX_REDUCE_SCATTER ? size * bytes : bytes;
  collective->bytes_plain = (size - 1) * (made.verb == CGX_ALLREDUCE ? 2 * bytes / size : bytes);
  if (engine_) collective->algorithm = make_algorithm(std::move(made));
  return collective;
}

// One rank alone: identity.
void Communicator::copy_through(const cgx_collective_t& call, Collective& collective) {
  require(!closed_, CGX_CLOSED, "communicator '", name, "' is closed: it was closed on this rank");
  collective.started = collective.agreed_at = Clock::now();
  pass_through(plan(call));
  collective.done = true;
  const std::lock_guard lock(totals_mutex_);
  totals_.add(collective, Clock::now());
}

Totals Communicator::totals() const {
  if (engine_) return engine_->totals();
  const std::lock_guard lock(totals_mutex_);
  return totals_;
}

// ---- devices -------------------------------------------------------------------------------

device::Group& Communicator::devices(device::Device& device) {
  const std::lock_guard lock(devices_mutex_);
  require(!closed(), CGX_CLOSED, "communicator '", name, "' is closed");
  if (!devices_) {
    devices_ = std::make_unique<device::Group>(device, *link_, type, timeout);
    connected_ = devices_.get();
  }
  require(&devices_->device() == &device, CGX_INVALID_ARGUMENT, "the buffers are on ",
          device.name(), ", but this rank's earlier ones on communicator '", name, "' were on ",
          devices_->device().name(), ": a rank has one device; make a communicator for each");
  return *devices_;
}

void Communicator::enqueue(const cgx_collective_t& call, device::Device& device) {
  require_device(call, CGX_CUDA, "cgx_enqueue is for CUDA; use cgx_start or cgx_run");
  Plan made = make_plan(call, rank, size);
  // Devices are one level: without a topology `auto` is not hierarchical.
  made.algorithm = pick_algorithm(made);
  require(made.algorithm == CGX_SRA || made.algorithm == CGX_ONE_SHOT, CGX_UNSUPPORTED,
          "algorithm is ", made.algorithm == CGX_RING ? "ring" : "hierarchical",
          "; on devices there are one_shot and sra: give one of them, or auto");
  check_addresses(call, device);
  const Agreement agreement = make_agreement(call, made);
  if (!engine_) {
    require(!closed_, CGX_CLOSED, "communicator '", name, "' is closed");
    return device::pass_through(made, *device.wrap(call.stream));
  }
  const Seconds at_most =
      call.timeout_s > 0 ? Seconds(std::min(call.timeout_s, kLongestTimeout)) : timeout;
  devices(device).enqueue(std::move(made), agreement, call.name ? call.name : "", at_most,
                          call.stream);
}

void Communicator::check_devices(bool finish) {
  if (device::Group* group = connected_) group->check(finish);
}

const char* Communicator::wire_name() const {
  const device::Group* group = connected_;
  return group ? group->wire() : "";
}

void Communicator::start(std::unique_ptr<Algorithm> algorithm, const std::string& key,
                         uint64_t number, const Agreement& agreement, Seconds at_most,
                         cgx_callback_t callback, void* context) {
  auto collective = std::make_shared<Collective>();
  collective->name = making("", key);
  collective->occurrence = static_cast<int64_t>(number);
  collective->agreement = agreement;
  collective->timeout = at_most;
  collective->counts = false;
  for (int member = 0; member < size; ++member) collective->members.push_back(member);
  collective->algorithm = std::move(algorithm);
  collective->callback = callback;
  collective->context = context;
  engine_->submit(collective);
}

// ---- what making others takes --------------------------------------------------------------

std::vector<Bytes> Communicator::exchange(const std::vector<int>& members, const std::string& key,
                                          const Bytes& mine, Seconds at_most) {
  require(mine.size() <= kMostBlobBytes, CGX_INTERNAL, "blob of ", mine.size(), " bytes");
  std::vector<Bytes> blobs(size);
  if (members.size() == 1) return {mine};
  auto collective = std::make_shared<Collective>();
  collective->name = key;
  collective->counts = false;
  collective->timeout = at_most;
  collective->members = members;
  collective->algorithm = std::make_unique<Exchange>(rank, mine, &blobs);
  engine_->run(collective);
  require_success(*collective);
  std::vector<Bytes> ordered;
  for (const int member : members) ordered.push_back(std::move(blobs[member]));
  return ordered;
}

void Communicator::close() {
  {
    const std::lock_guard lock(devices_mutex_);
    if (devices_ && !closed_) devices_->close(timeout);
  }
  if (engine_) engine_->close(timeout);
  closed_ = true;
}

// ---- making --------------------------------------------------------------------------------

namespace {

CommunicatorRef alone(const std::string& name, Communicator::Seconds timeout) {
  const auto topology = std::make_shared<Topology>(std::vector<int>{0});
  return std::make_shared<Communicator>(name, 0, topology, "AUTO", timeout, nullptr);
}

}  // namespace

CommunicatorRef connect(const std::string& name, int rank, int size, const Allgather& allgather,
                        const std::string& type, Communicator::Seconds timeout) {
  require(size >= 1 && rank >= 0 && rank < size, CGX_INVALID_ARGUMENT, "rank ", rank, " of size ",
          size);
  if (size == 1) return alone(name, timeout);
  const auto topology = exchange_hellos(allgather, type);
  std::string tried;
  const bool any = type == "AUTO" || type == "NCCL";  // NCCL is between devices only
  for (const auto& entry : transport_table()) {
    if (!any && type != entry.communicator_type) continue;
    std::string why;
    auto transport = try_transport(entry, rank, size, allgather, timeout, &why);
    if (transport)
      return std::make_shared<Communicator>(name, rank, topology, type, timeout,
                                            std::move(transport));
    tried += join("; ", entry.name, ": ", why);
  }
  fail(CGX_UNSUPPORTED, "no transport connects the ", size, " ranks of communicator '", name,
       "' (COMMUNICATOR_TYPE ", type, ")", tried);
}

std::vector<CommunicatorRef> connect_local(const std::string& name, std::vector<int> host_of,
                                           Communicator::Seconds timeout, const std::string& type) {
  const auto topology = std::make_shared<Topology>(std::move(host_of));
  const int size = topology->size();
  if (size == 1) return {alone(name + "/0", timeout)};
  std::vector<CommunicatorRef> communicators;
  std::vector<std::unique_ptr<Connector>> connectors;
  std::vector<Bytes> offers;
  for (int rank = 0; rank < size; ++rank) {
    connectors.push_back(make_thread_connector(rank, size));
    offers.push_back(connectors.back()->offer());
  }
  for (int rank = 0; rank < size; ++rank)
    communicators.push_back(
        std::make_shared<Communicator>(join(name, "/", rank), rank, topology, type, timeout,
                                       connectors[rank]->connect(offers, timeout)));
  return communicators;
}

CommunicatorRef split(Communicator& parent, int color, int key, const std::string& name) {
  check_name(name);
  struct Choice {
    int32_t color, key;
  };
  std::vector<int> everyone(parent.size);
  for (int rank = 0; rank < parent.size; ++rank) everyone[rank] = rank;
  const auto blobs = parent.exchange(everyone, making(name, "split"), to_bytes(Choice{color, key}),
                                     parent.timeout);
  if (color < 0) return nullptr;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int rank = 0; rank < parent.size; ++rank) {
    const auto choice = from_bytes<Choice>(blobs[rank]);
    if (choice.color == color) members.emplace_back(choice.key, rank);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [order, rank] : members) ranks.push_back(rank);
  return group(parent, ranks, name);
}

CommunicatorRef group(Communicator& parent, const std::vector<int>& ranks,
                      const std::string& name) {
  std::string list;
  for (const int rank : ranks) {
    require(rank >= 0 && rank < parent.size, CGX_INVALID_ARGUMENT, "rank ", rank,
            " is not in communicator '", parent.name, "' of size ", parent.size);
    require(std::count(ranks.begin(), ranks.end(), rank) == 1, CGX_INVALID_ARGUMENT, "rank ", rank,
            " is listed twice");
    list += join(list.empty() ? "" : ",", rank);
  }
  const auto self = std::find(ranks.begin(), ranks.end(), parent.rank);
  require(self != ranks.end(), CGX_INVALID_ARGUMENT, "this rank, ", parent.rank,
          ", is not among the ranks [", list, "]: only members call");
  // Ranks that are threads share the registry: each one's communicator has a name of its own.
  const std::string own =
      std::string(parent.transport_name()) == "thread" ? join(name, "/", parent.rank) : name;
  Registry::instance().require_free(own);
  // The list is part of the key: other members may be making another group of the same name.
  const uint64_t hash = std::hash<std::string>()(list);
  const std::string key = making(join(name, "#", hash), "group");
  const Allgather allgather = [&](const Bytes& mine) {
    return parent.exchange(ranks, key, mine, parent.timeout);
  };
  return connect(own, static_cast<int>(self - ranks.begin()), static_cast<int>(ranks.size()),
                 allgather, env_transport(), parent.timeout);
}

// ---- Registry ------------------------------------------------------------------------------

Registry& Registry::instance() {
  static auto* registry = new Registry;  // never destroyed: threads may outlive static destructors
  return *registry;
}

void Registry::require_free(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  require_free_locked(name);
}

void Registry::require_free_locked(const std::string& name) const {
  check_name(name);
  require(name != kWorldName, CGX_INVALID_ARGUMENT, "the name '", name,
          "' is kept for the communicator of all ranks: choose another");
  for (const auto& [id, communicator] : communicators_)
    require(communicator->name != name, CGX_INVALID_ARGUMENT, "a communicator named '", name,
            "' exists: close it first, or choose another name");
}

int32_t Registry::add(CommunicatorRef communicator) {
  const std::lock_guard lock(mutex_);
  require_free_locked(communicator->name);
  communicators_[next_] = std::move(communicator);
  return next_++;
}

void Registry::add_world(CommunicatorRef communicator) {
  const std::lock_guard lock(mutex_);
  communicators_[kWorld] = std::move(communicator);
}

CommunicatorRef Registry::find_world() const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.find(kWorld);
  return found == communicators_.end() ? nullptr : found->second;
}

CommunicatorRef Registry::get(int32_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.find(id);
  require(found != communicators_.end(), CGX_NOT_FOUND, "no communicator ", id,
          ": it was closed, or never made; cgx_init makes the world, 0");
  return found->second;
}

int32_t Registry::next(int32_t after) const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.upper_bound(after);
  return found == communicators_.end() ? -1 : found->first;
}

int32_t Registry::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  std::string known;
  for (const auto& [id, communicator] : communicators_) {
    if (communicator->name == name) return id;
    known += join(known.empty() ? "'" : ", '", communicator->name, "'");
  }
  fail(CGX_NOT_FOUND, "no communicator is named '", name,
       "'; known: ", known.empty() ? "none" : known);
}

CommunicatorRef Registry::remove(int32_t id) {
  auto communicator = get(id);
  const std::lock_guard lock(mutex_);
  communicators_.erase(id);
  return communicator;
}

std::vector<CommunicatorRef> Registry::remove_all() {
  const std::lock_guard lock(mutex_);
  std::vector<CommunicatorRef> all;
  for (auto& [id, communicator] : communicators_) all.push_back(std::move(communicator));
  communicators_.clear();
  return all;
}

}  // namespace cgx
