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
#include "kernels.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

// ---- the core's part -----------------------------------------------------------------------

// Of a rank in its group; noise_rank: in the default group, for noise (cgx.h).
struct Place {
  int64_t rank, size;
  int64_t noise_rank = 0;
};

struct Shape {
  int32_t algorithm = 0;
  std::vector<int64_t> scatter_bytes, gather_bytes;  // by rank
  int64_t stride = 0;                                // of the all-gather
};

// Concrete sizes: message lengths depend on them, so a graph is specialised to them.
std::vector<int64_t> sizes_of(at::TensorList xs) {
  std::vector<int64_t> numels;
  for (const at::Tensor& x : xs) numels.push_back(x.sym_numel().guard_int(__FILE__, __LINE__));
  return numels;
}

template <typename Use>
void with_carried(const std::vector<int64_t>& numels, at::ScalarType dtype, const Addresses& at,
                  const OwnSeed& seed, const Options& options, const Place& place, Use&& use) {
  with_collective(numels, dtype, at, seed, options, [&](cgx_collective_t* collective) {
    const auto noise_rank = static_cast<int32_t>(place.noise_rank);
    collective->noise_rank = &noise_rank;
    auto carried = make<cgx_carried_t>();
    carried.rank = static_cast<int32_t>(place.rank);
    carried.size = static_cast<int32_t>(place.size);
    carried.call = collective;
    use(&carried);
  });
}

Shape shape_of(at::TensorList xs, const Options& options, int64_t rank, int64_t size) {
  if (xs.empty() || size < 1 || rank < 0 || rank >= size) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::carried_*: ", xs.size(), " tensors, rank ", rank,
                                         " of ", size, "; give one tensor or more, and a rank"));
  }
  Shape shape;
  shape.scatter_bytes.resize(size);
  shape.gather_bytes.resize(size);
  // Messages are as long whatever the seed.
  with_carried(sizes_of(xs), xs[0].scalar_type(), {}, OwnSeed{}, options, {rank, size},
               [&](const cgx_carried_t* carried) {
                 check(cgx_carried_plan(carried, &shape.algorithm, shape.scatter_bytes.data(),
                                        shape.gather_bytes.data()));
               });
  shape.stride = *std::max_element(shape.gather_bytes.begin(), shape.gather_bytes.end());
  return shape;
}

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

// What a rank encodes at first: one message for all, or one for each other rank.
int64_t encoded_bytes(const Shape& shape, int64_t rank) {
  return shape.algorithm == CGX_ONE_SHOT ? shape.stride
                                         : sum(shape.scatter_bytes) - shape.scatter_bytes[rank];
}

void check_bytes(const at::Tensor& bytes, int64_t wanted) {
  if (bytes.scalar_type() == at::kByte && bytes.sym_numel() == wanted) return;
  C10_THROW_ERROR(
      ValueError,
      c10::str("cgx::carried_*: the messages are ", bytes.sym_numel(), " ", bytes.scalar_type(),
               " elements; these tensors and ranks make ", wanted, " bytes"));
}

int64_t arrived_bytes(const Shape& shape, int64_t rank, int64_t size) {
  return (size - 1) * shape.scatter_bytes[rank];
}

// One tensor needs no packing.
at::Tensor flat_of(at::TensorList xs) {
  return xs.size() == 1 ? xs[0].contiguous().view({-1}) : pack(xs);
}

// A message and the residuals that its step has completed.
class Step {
 public:
  Step(at::Tensor message, at::TensorList residuals)
      : message_(std::move(message)), like_(residuals) {
    if (!like_.empty()) flat_ = pack(like_);
  }
  void* residual() const { return flat_.defined() ? flat_.mutable_data_ptr() : nullptr; }
  std::vector<at::Tensor> results() const {
    std::vector<at::Tensor> all = empty_like(like_);
    if (flat_.defined()) unpack(flat_, all);
    all.insert(all.begin(), message_);
    return all;
  }

 private:
  const at::Tensor message_;
  const at::TensorList like_;
  at::Tensor flat_;
};

at::TensorOptions bytes_like(at::TensorList xs) { return xs[0].options().dtype(at::kByte); }

// ---- torch's part --------------------------------------------------------------------------

// Boxed, since the type of group_name in these schemas differs between releases of torch.
template <typename... Arguments>
at::Tensor functional(const char* name, Arguments&&... arguments) {
  torch::jit::Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack.at(0).toTensor();
}

// The name that init_process_group gives it.
constexpr const char* kDefaultGroup = "0";

// Its ranks in turn number the ranks of all groups; who has made a group without it has no other.
int64_t rank_in_default_group(const c10d::ProcessGroup& group) {
  if (group.getGroupName() == kDefaultGroup) return group.getRank();
  try {
    return c10d::resolve_process_group(kDefaultGroup)->getRank();
  } catch (const c10::Error&) {
    return group.getRank();
  }
}

at::Tensor wait(const at::Tensor& x) { return functional("_c10d_functional::wait_tensor", x); }

}  // namespace

std::vector<at::Tensor> all_reduce_carried(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, const Options& o) {
  static const auto encode = find_operator<decltype(carried_encode_cpu)>("cgx::carried_encode");
  static const auto reduce = find_operator<decltype(carried_reduce_cpu)>("cgx::carried_reduce");
  static const auto decode = find_operator<decltype(carried_decode_cpu)>("cgx::carried_decode");
  if (xs.empty()) return {};

  const std::string group_name = o.group_name.empty() ? kDefaultGroup : o.group_name;
  const auto group = c10d::resolve_process_group(group_name);
  const int64_t rank = group->getRank(), size = group->getSize();
  const Shape shape = shape_of(xs, o, rank, size);
  const int64_t noise_rank = rank_in_default_group(*group);
  const std::string packed = o.pack();
  const auto call = [&](const auto& op, auto&&... tensors) {
    return op.call(tensors..., seed, packed, rank, size, noise_rank);
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

  // A message, then residuals.
  std::vector<at::Tensor> step = call(encode, xs, residuals);
  if (shape.algorithm != CGX_ONE_SHOT) {
    std::vector<int64_t> from(size, shape.scatter_bytes[rank]), to = shape.scatter_bytes;
    from[rank] = to[rank] = 0;
    const at::Tensor arrived =
        wait(functional("_c10d_functional::all_to_all_single", step[0], from, to, group_name));
    step = call(reduce, xs, at::TensorList(step).slice(1), arrived);
  }
  const at::Tensor gathered =
      wait(functional("_c10d_functional::all_gather_into_tensor", step[0], size, group_name));
  std::vector<at::Tensor> results = call(decode, xs, gathered);
  results.insert(results.end(), step.begin() + 1, step.end());
  return results;
}

// ---- kernels -------------------------------------------------------------------------------

std::vector<at::Tensor> carried_encode_cpu(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t noise_rank) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(xs, seed, options);
  const at::Tensor flat = flat_of(xs);
  // What is not written (threshold needs less room than it has) goes to peers: it must not be what
  // was in this memory before.
  const at::Tensor message =
      at::zeros({encoded_bytes(shape_of(xs, options, rank, size), rank)}, bytes_like(xs));
  const Step step(message, residuals);
  with_carried(sizes_of(xs), flat.scalar_type(),
               {.input = flat.const_data_ptr(), .residual = step.residual()},
               seed_of(seed, options), options, {rank, size, noise_rank},
               [&](const cgx_carried_t* carried) {
                 check(cgx_carried_encode(carried, message.mutable_data_ptr()));
               });
  return step.results();
}

std::vector<at::Tensor> carried_reduce_cpu(at::TensorList xs, at::TensorList residuals,
                                           const at::Tensor& arrived, const Seed& seed,
                                           std::string_view call, int64_t rank, int64_t size,
                                           int64_t noise_rank) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(xs, seed, options);
  const Shape shape = shape_of(xs, options, rank, size);
  check_bytes(arrived, arrived_bytes(shape, rank, size));
  const at::Tensor flat = flat_of(xs), bytes = arrived.contiguous();
  // The padding goes to peers: it must not be what was in this memory before.
  const at::Tensor message = at::zeros({shape.stride}, bytes_like(xs));
  const Step step(message, residuals);
  with_carried(
      sizes_of(xs), flat.scalar_type(),
      {.input = flat.const_data_ptr(), .residual = step.residual()}, seed_of(seed, options),
      options, {rank, size, noise_rank}, [&](const cgx_carried_t* carried) {
        check(cgx_carried_reduce(carried, bytes.const_data_ptr(), message.mutable_data_ptr()));
      });
  return step.results();
}

std::vector<at::Tensor> carried_decode_cpu(at::TensorList like, const at::Tensor& gathered,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t /*noise_rank*/) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(like, seed, options);
  const int64_t stride = shape_of(like, options, rank, size).stride;
  check_bytes(gathered, size * stride);
  const std::vector<int64_t> numels = sizes_of(like);
  const at::Tensor bytes = gathered.contiguous();
  std::vector<at::Tensor> results = empty_like(like);
  const at::Tensor flat =
      results.size() == 1 ? results[0].view({-1}) : at::empty({sum(numels)}, like[0].options());
  const at::Tensor values = size == 1 ? flat_of(like) : at::Tensor();
  const void* const input = values.defined() ? values.const_data_ptr() : nullptr;
  with_carried(numels, flat.scalar_type(), {.input = input, .output = flat.mutable_data_ptr()},
               seed_of(seed, options), options, {rank, size}, [&](const cgx_carried_t* carried) {
                 check(cgx_carried_decode(carried, bytes.const_data_ptr(), stride));
               });
  if (results.size() > 1) unpack(flat, results);
  return results;
}

std::vector<at::Tensor> carried_encode_meta(at::TensorList xs, at::TensorList residuals,
                                            const Seed& seed, std::string_view call, int64_t rank,
                                            int64_t size, int64_t /*noise_rank*/) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(xs, seed, options);
  std::vector<at::Tensor> results = empty_like(residuals);
  const int64_t bytes = encoded_bytes(shape_of(xs, options, rank, size), rank);
  results.insert(results.begin(), at::empty({bytes}, bytes_like(xs)));
  return results;
}

std::vector<at::Tensor> carried_reduce_meta(at::TensorList xs, at::TensorList residuals,
                                            const at::Tensor& arrived, const Seed& seed,
                                            std::string_view call, int64_t rank, int64_t size,
                                            int64_t /*noise_rank*/) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(xs, seed, options);
  const Shape shape = shape_of(xs, options, rank, size);
  check_bytes(arrived, arrived_bytes(shape, rank, size));
  std::vector<at::Tensor> results = empty_like(residuals);
  results.insert(results.begin(), at::empty({shape.stride}, bytes_like(xs)));
  return results;
}

std::vector<at::Tensor> carried_decode_meta(at::TensorList like, const at::Tensor& gathered,
                                            const Seed& seed, std::string_view call, int64_t rank,
                                            int64_t size, int64_t /*noise_rank*/) {
  const Options options = Options::unpack(call, /*group_name=*/"");
  check_list(like, seed, options);
  check_bytes(gathered, size * shape_of(like, options, rank, size).stride);
  return all_reduce_coalesced_meta(like, seed, call, /*group_name=*/"");
}

}  // namespace cgx::torch_ops
