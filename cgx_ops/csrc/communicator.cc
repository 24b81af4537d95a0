#include "communicator.h"

#include <algorithm>

#include "algorithm/chunks.h"
#include "algorithm/exchange.h"
#include "algorithm/refusal.h"
#include "base/bytes.h"
#include "base/status.h"
#include "device/addresses.h"
#include "device/steps.h"

namespace cgx {
namespace {

constexpr size_t kMostBlobBytes = 4096;
constexpr Communicator::Seconds kLongestAbort(1);  // that peers' GPUs may take to disconnect
constexpr size_t kLongestRefusal = 512;  // with the name, this fits the control messages of every
                                         // transport

void require_success(const Collective& collective) {
  require(collective.status == CGX_OK, collective.status, collective.error);
}

// The communicator as its group of devices sees it.
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
    return communicator_.exchange(everyone_, internal_key("", what), mine, timeout);
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

}  // namespace

std::string internal_key(const std::string& name, const std::string& what) {
  return join(kInternal, what, name.empty() ? "" : ":", name);
}

Communicator::Communicator(std::string name, int rank, int noise_rank,
                           std::shared_ptr<const Topology> topology, std::string type,
                           Seconds timeout, int64_t unread_bytes,
                           std::unique_ptr<Transport> transport, bool elastic)
    : name(std::move(name)),
      rank(rank),
      noise_rank(noise_rank),
      size(topology->size()),
      topology(std::move(topology)),
      type(std::move(type)),
      timeout(timeout),
      elastic(elastic),
      engine_(transport ? std::make_unique<Engine>(this->name, rank, size, std::move(transport))
                        : nullptr),
      most_chunk_bytes_(engine_ ? transport_entry(engine_->transport_name()).chunk_bytes
                                : kChunkBytes),
      unread_bytes_(unread_bytes),
      link_(std::make_unique<Link>(this)) {}

Communicator::~Communicator() { close(); }

std::shared_ptr<Collective> Communicator::start(const cgx_collective_t& call,
                                                cgx_callback_t callback, void* context) {
  auto collective = prepare(call);
  if (engine_) {
    collective->callback = callback;
    collective->context = context;
    try {
      engine_->submit(collective);
    } catch (const Error& error) {  // peers would wait for this rank
      if (error.status() == CGX_SYSTEM) refuse(call, CGX_SYSTEM, error.what());
      throw;
    }
  } else if (callback) {
    notify(*collective, callback, context);
  }
  return collective;
}

void Communicator::notify(Collective& collective, cgx_callback_t callback, void* context) {
  require(!collective.notified.exchange(true), CGX_INVALID_ARGUMENT,
          "this request already has a callback; ", "call several functions from one callback");
  if (engine_ && engine_->notify(collective, callback, context)) return;
  collective.calling_back = true;
  callback(context, collective.status, collective.error.c_str());
  collective.calling_back = false;
  collective.calling_back.notify_all();
}

void Communicator::run(const cgx_collective_t& call) {
  const auto collective = prepare(call);
  if (!engine_) return;
  engine_->run(collective);
  require_success(*collective);
}

std::shared_ptr<Collective> Communicator::run(const cgx_collective_t& call, Seconds at_most) {
  auto collective = prepare(call);
  if (engine_) engine_->run(collective, std::chrono::duration_cast<Clock::duration>(at_most));
  if (!collective->done) return collective;
  require_success(*collective);
  return nullptr;
}

void Communicator::refuse(const cgx_collective_t& call, cgx_status_t status,
                          const std::string& message) {
  if (!engine_) return;
  auto collective = named(call);
  collective->counts = false;
  collective->refusal = {status, cut(message, kLongestRefusal)};
  collective->algorithm = std::make_unique<Refusal>();
  engine_->submit(collective);
}

void Communicator::wait(Collective& collective) {
  if (engine_) engine_->wait(collective);
  collective.calling_back.wait(true);
  require_success(collective);
}

bool Communicator::wait(Collective& collective, Seconds at_most) {
  if (engine_) engine_->wait(collective, std::chrono::duration_cast<Clock::duration>(at_most));
  return collective.done;
}

Plan Communicator::checked(const cgx_collective_t& call) const {
  Plan made = make_plan(call, rank, size);
  if (!call.noise_rank) made.noise_rank = noise_rank;
  return made;
}

Plan Communicator::plan(const cgx_collective_t& call) const {
  Plan made = checked(call);
  made.topology = topology;
  resolve_algorithm(&made);
  made.chunk_bytes = fitting_chunk_bytes(made, most_chunk_bytes_);
  made.unread_bytes = unread_bytes_;
  return made;
}

Communicator::Seconds Communicator::timeout_of(const cgx_collective_t& call) const {
  return call.timeout_s > 0 ? Seconds(std::min(call.timeout_s, kLongestTimeout)) : timeout;
}

std::shared_ptr<Collective> Communicator::named(const cgx_collective_t& call) const {
  auto collective = std::make_shared<Collective>();
  collective->name = call.name ? call.name : "";
  require(collective->name.size() <= kLongestName, CGX_INVALID_ARGUMENT,
          "the collective's name has ", collective->name.size(), " bytes; accepted: at most ",
          kLongestName);
  collective->occurrence = call.occurrence;
  collective->timeout = timeout_of(call);
  collective->members = members_of(call, rank, size);
  return collective;
}

std::shared_ptr<Collective> Communicator::prepare(const cgx_collective_t& call) {
  try {
    return planned(call);
  } catch (const std::bad_alloc&) {  // peers would wait for this rank
    refuse(call, CGX_SYSTEM, "out of memory");
    throw;
  }
}

std::shared_ptr<Collective> Communicator::planned(const cgx_collective_t& call) {
  require_device(call, CGX_CPU, "cgx_start and cgx_run support CPU buffers; use cgx_enqueue");
  Plan made = plan(call);
  auto collective = named(call);
  collective->bytes_in = made.bytes_in();
  collective->bytes_plain = made.bytes_plain();
  collective->announcement =
      call.peer && call.input_splits[*call.peer] + call.output_splits[*call.peer] == 0;
  collective->counts = !collective->announcement;
  if (engine_) {
    collective->agreement = make_agreement(call, made);
    collective->algorithm = make_algorithm(std::move(made));
  } else {
    copy_through(made, collective.get());
  }
  return collective;
}

// One rank alone: copies.
void Communicator::copy_through(const Plan& plan, Collective* collective) {
  require_open();
  collective->started = collective->agreed_at = Clock::now();
  pass_through(plan);
  collective->done = true;
  const std::lock_guard lock(totals_mutex_);
  totals_.add(*collective, Clock::now());
}

void Communicator::finish(Seconds at_most) {
  if (!engine_ || std::string_view(transport_name()) == "thread") return;
  engine_->finish(std::chrono::duration_cast<Clock::duration>(at_most));
}

void Communicator::require_peers(Seconds at_most) {
  if (engine_) engine_->require_peers(std::chrono::duration_cast<Clock::duration>(at_most));
}

void Communicator::require_open() const {
  if (engine_) return engine_->require_open();
  require(!closed_, CGX_CLOSED, "communicator '", name, "' is closed: it was closed on this rank");
}

Totals Communicator::totals() const {
  if (engine_) return engine_->totals();
  const std::lock_guard lock(totals_mutex_);
  return totals_;
}

// ---- devices -------------------------------------------------------------------------------

device::Group& Communicator::devices(device::Device& device, Seconds at_most) {
  const std::lock_guard lock(devices_mutex_);
  if (devices_) devices_->check(/*finish=*/false);  // its failure may have closed the communicator
  require_open();
  if (!devices_) {
    devices_ = std::make_unique<device::Group>(device, *link_, type, at_most);
    connected_ = devices_.get();
  }
  require(&devices_->device() == &device, CGX_INVALID_ARGUMENT, "the buffers are on ",
          device.name(), ", but earlier ones on communicator '", name, "' were on ",
          devices_->device().name(),
          ": a communicator uses one device per rank; create another communicator");
  return *devices_;
}

void Communicator::enqueue(const cgx_collective_t& call, device::Device& device) {
  require_device(call, CGX_CUDA, "cgx_enqueue supports CUDA buffers; use cgx_start or cgx_run");
  Plan made = checked(call);
  require(!call.peer, CGX_UNSUPPORTED,
          "a call with a peer is not supported on GPUs: copy the buffers to the CPU, and use "
          "cgx_start or cgx_run");
  // GPUs are one level: without a topology `auto` is never hierarchical.
  resolve_algorithm(&made);
  require(made.algorithm == CGX_SRA || made.algorithm == CGX_ONE_SHOT, CGX_UNSUPPORTED,
          "algorithm is ", made.algorithm == CGX_RING ? "ring" : "hierarchical",
          "; GPUs support one_shot and sra: use one of them, or auto");
  const auto current = device.make_current();  // once, for all operations below
  device::check_addresses(call, device);
  const Agreement agreement = make_agreement(call, made);
  if (!engine_) {
    require_open();
    return device::pass_through(made, *device.wrap(call.stream));
  }
  const Seconds at_most = timeout_of(call);
  devices(device, at_most)
      .enqueue(std::move(made), agreement, call.name ? call.name : "", at_most, call.stream);
}

void Communicator::refuse(const cgx_collective_t& call, device::Device& device,
                          const std::string& message) {
  if (!engine_ || !call.input_splits) return;  // ranks compare calls with splits only
  const auto current = device.make_current();
  const Seconds at_most = timeout_of(call);
  devices(device, at_most).refuse(cut(message, kLongestRefusal), at_most);
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
  collective->name = internal_key("", key);
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

// ---- setup of other communicators ----------------------------------------------------------

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
  close_devices(timeout);
  if (engine_) engine_->close(timeout);
  closed_ = true;
}

void Communicator::abort(const std::string& reason) {
  close_devices(kLongestAbort);
  if (engine_) engine_->abort(reason);
  closed_ = true;
}

void Communicator::close_devices(Seconds at_most) {
  const std::lock_guard lock(devices_mutex_);
  if (devices_ && !closed_) devices_->close(at_most);
}

}  // namespace cgx
