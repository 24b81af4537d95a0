#include "carried.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "coalesced.h"
#include "core.h"
#include "cuda.h"
#include "kernels.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

// ---- the core's steps ----------------------------------------------------------------------

// A rank in its group. noise_rank is its rank in the default group (see cgx.h).
struct Place {
  int64_t rank, size;
  int64_t noise_rank = 0;
  void* stream = nullptr;  // where a CUDA call is enqueued
};

// Message sizes of a call, in bytes.
struct Lengths {
  bool one_shot = false;
  std::vector<int64_t> to, from;     // per rank, in the all-to-all
  int64_t encoded = 0, reduced = 0;  // messages of encode and reduce
};

template <typename Use>
void with_carried(at::IntArrayRef numels, const at::Tensor& like, const Addresses& at,
                  const OwnSeed& seed, const Options& options, const Place& place, Use&& use) {
  CallBuilder call = make_call(numels, like.scalar_type(), at, seed, options);
  call.fields.device = like.is_cuda() ? CGX_CUDA : CGX_CPU;
  call.fields.stream = place.stream;
  call.noise_rank = static_cast<int32_t>(place.noise_rank);
  auto carried = make<cgx_carried_t>();
  carried.rank = static_cast<int32_t>(place.rank);
  carried.size = static_cast<int32_t>(place.size);
  carried.call = &call.get();
  use(&carried);
}

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

Lengths lengths_of(at::TensorList xs, const Options& options, int64_t rank, int64_t size) {
  std::vector<int64_t> scatter(size), gather(size);
  int32_t algorithm = 0;
  // Sizes do not depend on the seed.
  with_carried(numels_of(xs), xs[0], {}, OwnSeed{}, options, {rank, size},
               [&](const cgx_carried_t* carried) {
                 check(cgx_carried_plan(carried, &algorithm, scatter.data(), gather.data()));
               });
  // all_gather_into_tensor needs equal sizes.
  Lengths lengths{.one_shot = algorithm == CGX_ONE_SHOT,
                  .to = std::move(scatter),
                  .reduced = *std::max_element(gather.begin(), gather.end())};
  lengths.from.assign(size, lengths.to[rank]);
  // The core wants room for a GPU's message to itself, so the all-to-all has one, too.
  if (!xs[0].is_cuda()) lengths.from[rank] = lengths.to[rank] = 0;
  lengths.encoded = lengths.one_shot ? lengths.reduced : sum(lengths.to);
  return lengths;
}

// Throws unless a step supports these tensors.
Options checked_options(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                        std::string_view call) {
  TORCH_CHECK_VALUE(!xs.empty(), "cgx::carried_*: the list of tensors is empty; pass at least one");
  return checked_list(xs, residuals, seed, call, /*group_name=*/"");
}

at::Tensor as_bytes(const at::Tensor& messages) {
  TORCH_CHECK_TYPE(messages.scalar_type() == at::kByte, "cgx::carried_*: the messages have dtype ",
                   messages.scalar_type(), "; expected uint8");
  return messages.contiguous();
}

// A single tensor is not packed.
at::Tensor flat_of(at::TensorList xs) {
  return xs.size() == 1 ? xs[0].contiguous().view({-1}) : pack(xs);
}

at::TensorOptions bytes_like(at::TensorList xs) { return xs[0].options().dtype(at::kByte); }

// Runs make(carried, message), which writes a message of `bytes`. Returns the message, then the
// updated residuals.
template <typename Make>
std::vector<at::Tensor> make_message(at::TensorList xs, at::TensorList residuals, int64_t bytes,
                                     const Seed& seed, std::string_view call, Place place,
                                     Make&& make) {
  const Options options = checked_options(xs, residuals, seed, call);
  const CurrentStream stream(xs[0].device());
  place.stream = stream.handle;
  const at::Tensor flat = flat_of(xs), message = at::empty({bytes}, bytes_like(xs));
  const at::Tensor kept = residuals.empty() ? at::Tensor() : pack(residuals);
  void* const residual = kept.defined() ? kept.mutable_data_ptr() : nullptr;
  with_carried(numels_of(xs), flat, {.input = flat.const_data_ptr(), .residual = residual},
               seed_of(seed, options), options, place, [&](const cgx_carried_t* carried) {
                 check(make(carried, message.mutable_data_ptr()));
               });
  std::vector<at::Tensor> results = empty_like(residuals);
  if (kept.defined()) unpack(kept, results);
  results.insert(results.begin(), message);
  return results;
}

// ---- torch's collectives -------------------------------------------------------------------

// A boxed call, since the type of group_name in these schemas differs between torch releases.
template <typename... Arguments>
at::Tensor functional(const char* name, Arguments&&... arguments) {
  torch::jit::Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack.at(0).toTensor();
}

// The name that init_process_group gives the default group.
constexpr const char* kDefaultGroup = "0";

// Ranks of the default group identify ranks in all groups. A program that never made it has only
// one numbering.
int64_t rank_in_default_group(const c10d::ProcessGroup& group) {
  if (group.getGroupName() == kDefaultGroup) return group.getRank();
  try {
    return c10d::resolve_process_group(kDefaultGroup)->getRank();
  } catch (const c10::Error&) {
    return group.getRank();
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    C10_THROW_ERROR(ValueError,
                    c10::str("carrier='c10d': torch.distributed has no process group named '", name,
                             "': call init_process_group() first, or pass group.group_name"));
  }
}

// gloo's all_gather_into_tensor would read GPU memory on the host.
void require_gather(c10d::ProcessGroup& group, const at::Tensor& x) {
  if (!x.is_cuda()) return;
  std::string backend;
  try {
    backend = group.getBackend(c10::DeviceType::CUDA)->getBackendName();
  } catch (const c10::Error&) {
    return;  // a group that is not made of backends
  }
  TORCH_CHECK_VALUE(backend != "gloo", "carrier='c10d': process group '", group.getGroupName(),
                    "' uses gloo, which cannot gather CUDA tensors: pass a group with NCCL, or "
                    "use carrier='native'");
}

at::Tensor wait(const at::Tensor& x) { return functional("_c10d_functional::wait_tensor", x); }

}  // namespace

std::vector<at::Tensor> all_reduce_carried(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, const Options& o) {
  static const auto encode = find_operator<decltype(carried_encode_kernel)>("cgx::carried_encode");
  static const auto reduce = find_operator<decltype(carried_reduce_kernel)>("cgx::carried_reduce");
  static const auto decode = find_operator<decltype(carried_decode_kernel)>("cgx::carried_decode");
  if (xs.empty()) return {};

  const std::string group_name = o.group_name.empty() ? kDefaultGroup : o.group_name;
  const auto group = find_group(group_name);
  const int64_t rank = group->getRank(), size = group->getSize();
  const Lengths lengths = lengths_of(xs, o, rank, size);
  const int64_t noise_rank = rank_in_default_group(*group);
  const std::string packed = o.pack();
  const auto call = [&](const auto& op, auto&&... own) {
    return op.call(own..., seed, packed, rank, size, noise_rank);
  };
  if (size == 1) {
    std::vector<at::Tensor> sums = xs.vec();
    for (size_t i = 0; i < residuals.size(); ++i) sums[i] = sums[i].add(residuals[i]);
    std::vector<at::Tensor> results =
        call(decode, at::TensorList(sums), at::empty({0}, bytes_like(xs)));
    for (const at::Tensor& residual : residuals)
      results.push_back(at::zeros_like(residual, at::MemoryFormat::Contiguous));
    return results;
  }

  require_gather(*group, xs[0]);
  report_operators(o, rank, size, kTorchsCollectives);
  // A message, then residuals.
  std::vector<at::Tensor> step = call(encode, xs, residuals, lengths.encoded);
  if (!lengths.one_shot) {
    const at::Tensor arrived = wait(functional("_c10d_functional::all_to_all_single", step[0],
                                               lengths.from, lengths.to, group_name));
    step = call(reduce, xs, at::TensorList(step).slice(1), arrived, lengths.reduced);
  }
  const at::Tensor gathered =
      wait(functional("_c10d_functional::all_gather_into_tensor", step[0], size, group_name));
  std::vector<at::Tensor> results = call(decode, xs, gathered);
  results.insert(results.end(), step.begin() + 1, step.end());
  return results;
}

// ---- kernels -------------------------------------------------------------------------------

std::vector<at::Tensor> carried_encode_kernel(at::TensorList xs, at::TensorList residuals,
                                              int64_t bytes, const Seed& seed,
                                              std::string_view call, int64_t rank, int64_t size,
                                              int64_t noise_rank) {
  return make_message(xs, residuals, bytes, seed, call, {rank, size, noise_rank},
                      [&](const cgx_carried_t* carried, void* message) {
                        return cgx_carried_encode(carried, message, bytes);
                      });
}

std::vector<at::Tensor> carried_reduce_kernel(at::TensorList xs, at::TensorList residuals,
                                              const at::Tensor& arrived, int64_t bytes,
                                              const Seed& seed, std::string_view call, int64_t rank,
                                              int64_t size, int64_t noise_rank) {
  const at::Tensor from = as_bytes(arrived);
  return make_message(xs, residuals, bytes, seed, call, {rank, size, noise_rank},
                      [&](const cgx_carried_t* carried, void* message) {
                        return cgx_carried_reduce(carried, from.const_data_ptr(), from.numel(),
                                                  message, bytes);
                      });
}

std::vector<at::Tensor> carried_decode_kernel(at::TensorList like, const at::Tensor& gathered,
                                              const Seed& seed, std::string_view call, int64_t rank,
                                              int64_t size, int64_t /*noise_rank*/) {
  const Options options = checked_options(like, {}, seed, call);
  const CurrentStream stream(like[0].device());
  const Place place{.rank = rank, .size = size, .stream = stream.handle};
  const std::vector<int64_t> numels = numels_of(like);
  const at::Tensor from = as_bytes(gathered);
  std::vector<at::Tensor> results = empty_like(like);
  const at::Tensor flat =
      results.size() == 1 ? results[0].view({-1}) : at::empty({sum(numels)}, like[0].options());
  const at::Tensor values = size == 1 ? flat_of(like) : at::Tensor();
  const void* const input = values.defined() ? values.const_data_ptr() : nullptr;
  with_carried(numels, flat, {.input = input, .output = flat.mutable_data_ptr()},
               seed_of(seed, options), options, place, [&](const cgx_carried_t* carried) {
                 check(cgx_carried_decode(carried, from.const_data_ptr(), from.numel()));
               });
  if (results.size() > 1) unpack(flat, results);
  return results;
}

std::vector<at::Tensor> carried_encode_meta(at::TensorList xs, at::TensorList residuals,
                                            int64_t bytes, const Seed& seed, std::string_view call,
                                            int64_t /*rank*/, int64_t /*size*/,
                                            int64_t /*noise_rank*/) {
  checked_options(xs, residuals, seed, call);
  std::vector<at::Tensor> results = empty_like(residuals);
  results.insert(results.begin(), at::empty({bytes}, bytes_like(xs)));
  return results;
}

std::vector<at::Tensor> carried_reduce_meta(at::TensorList xs, at::TensorList residuals,
                                            const at::Tensor& /*arrived*/, int64_t bytes,
                                            const Seed& seed, std::string_view call, int64_t rank,
                                            int64_t size, int64_t noise_rank) {
  return carried_encode_meta(xs, residuals, bytes, seed, call, rank, size, noise_rank);
}

std::vector<at::Tensor> carried_decode_meta(at::TensorList like, const at::Tensor& /*gathered*/,
                                            const Seed& seed, std::string_view call,
                                            int64_t /*rank*/, int64_t /*size*/,
                                            int64_t /*noise_rank*/) {
  checked_options(like, {}, seed, call);
  return all_reduce_coalesced_meta(like, {}, seed, call, /*group_name=*/"");
}

}  // namespace cgx::torch_ops
