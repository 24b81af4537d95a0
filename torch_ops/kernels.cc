#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "core.h"
#include "cuda.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

std::atomic<GroupFinder> group_finder{nullptr};
std::atomic<GroupSizer> group_sizer{nullptr};
std::atomic<StartReport> start_report{nullptr};

// Returns the communicator of a name. Python finds process groups without one, and the empty name.
int32_t find_communicator(const std::string& group_name) {
  int32_t comm = -1;
  if (!group_name.empty() && cgx_comm_find(group_name.c_str(), &comm) == CGX_OK) return comm;
  return group_finder.load()(group_name);
}

// True for the first call with this flag only.
bool is_first(std::atomic<bool>& done) {
  return !done.load(std::memory_order_relaxed) && !done.exchange(true);
}

// Returns the communicator of a call, and logs the first call.
int32_t communicator_of(const Options& options) {
  const int32_t comm = find_communicator(options.group_name);
  static std::atomic<bool> asked{false};
  if (is_first(asked)) {
    auto info = make<cgx_comm_info_t>();
    check(cgx_comm_info(comm, &info));
    report_operators(options, info.rank, info.size, info.transport);
  }
  return comm;
}

Addresses addresses_of(const Buffers& buffers) {
  Addresses at;
  at.output = buffers.output.mutable_data_ptr();  // first, because it may materialize a lazy copy,
                                                  // of the input too
  if (!buffers.residuals.empty()) at.residual = buffers.residuals[0].mutable_data_ptr();
  at.input = buffers.input.const_data_ptr();
  return at;
}

// Checks x and returns the buffers of its reduction.
Buffers checked_buffers(const at::Tensor& x, const Seed& seed, const Options& options) {
  options.check(x);
  check_seed(x, seed, options);
  return {.input = x.contiguous(), .output = at::empty_like(x, at::MemoryFormat::Contiguous)};
}

// `splits`, which may be null, must outlive the call.
void set_splits(const Splits* splits, CallBuilder* call) {
  if (!splits) return;
  call->fields.input_splits = splits->input.data();
  call->fields.output_splits = splits->output.data();
  call->fields.block_numel = splits->row;
}

}  // namespace

void find_groups_by(GroupFinder finder, GroupSizer sizer) {
  group_finder = finder;
  group_sizer = sizer;
}

int64_t group_size(const std::string& group_name) { return group_sizer.load()(group_name); }

void require_size(const Options& options, int64_t size) {
  auto info = make<cgx_comm_info_t>();
  check(cgx_comm_info(communicator_of(options), &info));
  if (info.size == size) return;
  C10_THROW_ERROR(ValueError,
                  c10::str(operator_name(options.verb), ": group '", options.group_name, "' has ",
                           info.size, " ranks, but the call is for ", size,
                           ": its members have changed since the graph was compiled; call "
                           "torch._dynamo.reset() to compile it again"));
}

void report_start_by(StartReport report) { start_report = report; }

void report_operators(const Options& options, int64_t rank, int64_t size, const char* transport) {
  static std::atomic<bool> reported{false};
  if (is_first(reported))
    start_report.load()("operators", *options.config_text, rank, size, transport);
}

void report_exact_reduce_scatter(int64_t rank, int64_t size) {
  static std::atomic<bool> reported{false};
  if (is_first(reported))
    start_report.load()("reduce_scatter", "bits=32", rank, size, kTorchsCollectives);
}

void run(const Buffers& buffers, at::IntArrayRef numels, const Seed& seed, const Options& options,
         const Splits* splits) {
  const at::Tensor& input = buffers.input;
  CallBuilder call = make_call(numels, input.scalar_type(), addresses_of(buffers),
                               seed_of(seed, options), options);
  set_splits(splits, &call);
  call.fields.comm = communicator_of(options);
  const cgx_collective_t& collective = call.get();
  at::RecordFunction record(at::RecordScope::USER_SCOPE);
  if (record.isActive()) {
    const std::vector<c10::IValue> arguments{input};
    record.before(profile_title(collective), &arguments);
  }
  if (input.is_cuda()) return enqueue(collective, input.device());
  check(cgx_run(&collective));
}

c10::intrusive_ptr<c10d::Work> launch(Buffers buffers, at::IntArrayRef numels, const Seed& seed,
                                      const Options& options, const Splits* splits) {
  const OwnSeed own = seed_of(seed, options);
  buffers.seed = own.on_device;
  CallBuilder call =
      make_call(numels, buffers.input.scalar_type(), addresses_of(buffers), own, options);
  set_splits(splits, &call);
  call.fields.comm = communicator_of(options);
  const auto type = torch_verb(options.verb).type;
  return start(call.get(), std::move(buffers), type);
}

void refuse(CallBuilder call, const at::Tensor& x, const c10::Error& error) {
  static constexpr int64_t kNotRead = 0;
  const c10::DeviceGuard guard(x.device());
  if (x.is_cuda()) call.fields.device = CGX_CUDA;
  if (call.fields.verb == CGX_ALL_TO_ALL) call.fields.input_splits = &kNotRead;
  cgx_refuse(&call.get(), CGX_PEER_FAILED, error.what_without_backtrace());
}

void or_refuse(const Options& options, const at::Tensor& x, const std::function<void()>& check) {
  try {
    check();
  } catch (const c10::Error& error) {
    CallBuilder call = options.collective();
    call.fields.comm = communicator_of(options);
    refuse(std::move(call), x, error);
    throw;
  }
}

void check_seed(const at::Tensor& x, const Seed& seed, const Options& options) {
  if (!options.needs_seed()) return;
  if (!seed.has_value() || seed->scalar_type() != at::kLong || seed->dim() != 0) {
    C10_THROW_ERROR(ValueError,
                    c10::str("cgx::quantized_all_reduce: this config needs a seed, an int64 tensor "
                             "without dimensions: torch.ops.cgx.draw_seed(torch.empty(0)), or "
                             "torch.ops.cgx.draw_indices for randk"));
  }
  if (!seed->is_cpu() && seed->device() != x.device()) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_all_reduce: seed is on ", seed->device(),
                                         ", x on ", x.device(), "; use seed.cpu()"));
  }
}

OwnSeed seed_of(const Seed& seed, const Options& options) {
  OwnSeed own;
  if (!options.needs_seed()) return own;
  // The gradient's seed is derived from the forward seed: backward must not draw from the
  // generator, because checkpointing does not restore it there.
  if (seed->is_cpu()) {
    own.number = nth_seed(*seed->const_data_ptr<int64_t>(), options.depth);
  } else {
    own.on_device = options.depth == 0 ? *seed : at::add(*seed, nth_offset(options.depth));
  }
  return own;
}

CallBuilder make_call(at::IntArrayRef numels, at::ScalarType dtype, const Addresses& at,
                      const OwnSeed& seed, const Options& options) {
  CallBuilder call = options.collective();
  call.fields.dtype = *core_dtype(dtype);
  call.fields.seed = seed.number;
  if (seed.on_device.defined()) call.fields.device_seed = seed.on_device.const_data_ptr<int64_t>();
  call.fields.input = at.input;
  call.fields.output = at.output;
  for (const int64_t numel : numels) {
    const auto offset = call.add(numel) * static_cast<int64_t>(at::elementSize(dtype));
    if (at.residual) call.residuals.push_back(static_cast<char*>(at.residual) + offset);
  }
  return call;
}

at::Tensor draw_seed_cpu(const at::Tensor& /*distinct*/) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return at::scalar_tensor(static_cast<int64_t>(generator->random64()),
                           at::TensorOptions().dtype(at::kLong).device(at::kCPU));
}

at::Tensor draw_seed_cuda(const at::Tensor& distinct) {
  at::Tensor seed = at::empty({}, distinct.options().dtype(at::kLong));
  const std::optional<int64_t> no_bound;
  return seed.random_(std::numeric_limits<int64_t>::min(), no_bound);
}

at::Tensor draw_seed_meta(const at::Tensor& distinct) {
  return at::empty({}, distinct.options().dtype(at::kLong));
}

at::Tensor draw_indices_cpu(const at::Tensor& /*distinct*/, std::string_view group_name,
                            std::string_view name) {
  static std::mutex mutex;
  static auto* counts = new std::map<std::pair<std::string, std::string>, int64_t>;
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t count = ++(*counts)[{std::string(group_name), std::string(name)}];
  // The group's name is not used, because it differs between ranks that are threads.
  return at::scalar_tensor(nth_seed(named_seed(/*seed=*/0, name), count),
                           at::TensorOptions().dtype(at::kLong).device(at::kCPU));
}

at::Tensor draw_indices_meta(const at::Tensor& distinct, std::string_view /*group_name*/,
                             std::string_view /*name*/) {
  return draw_seed_meta(distinct);
}

at::Tensor all_reduce_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                             std::string_view group_name) {
  const Options options = Options::unpack(call, group_name);
  const Buffers buffers = checked_buffers(x, seed, options);
  run(buffers, {x.numel()}, seed, options);
  return buffers.output;
}

at::Tensor start_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                        std::string_view group_name) {
  return borrow_kernel(x.clone(at::MemoryFormat::Contiguous), seed, call, group_name);
}

at::Tensor borrow_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                         std::string_view group_name) {
  const Options options = Options::unpack(call, group_name);
  Buffers buffers = checked_buffers(x, seed, options);
  at::Tensor output = buffers.output;
  c10d::register_work(output, launch(std::move(buffers), {x.numel()}, seed, options));
  return output;
}

at::Tensor all_reduce_meta(const at::Tensor& x, const Seed& seed, std::string_view call,
                           std::string_view group_name) {
  const Options options = Options::unpack(call, group_name);
  options.check(x);
  check_seed(x, seed, options);
  return at::empty_symint(x.sym_sizes(), x.options());
}

}  // namespace cgx::torch_ops
