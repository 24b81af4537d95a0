#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "status.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

int32_t find_communicator(const std::string& group_name) {
  int32_t comm = -1;
  check(group_name.empty() ? cgx_init(&comm) : cgx_comm_find(group_name.c_str(), &comm));
  return comm;
}

int32_t cgx_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return CGX_FLOAT16;
    case at::kBFloat16:
      return CGX_BFLOAT16;
    default:
      return CGX_FLOAT32;
  }
}

// The seed of the n-th derivative of a call: its own stream of noise, without a draw from the
// generator in backward, where checkpointing does not restore it. SplitMix64's output function.
int64_t derive(int64_t seed, int64_t depth) {
  if (depth == 0) return seed;
  uint64_t z = static_cast<uint64_t>(seed) + static_cast<uint64_t>(depth) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<int64_t>(z ^ (z >> 31));
}

void check_call(const at::Tensor& x, const std::optional<at::Tensor>& seed,
                const Options& options) {
  options.check(x);
  if (!options.stochastic()) return;
  if (!seed.has_value() || seed->scalar_type() != at::kLong || seed->dim() != 0) {
    C10_THROW_ERROR(ValueError,
                    "cgx::quantized_all_reduce: stochastic rounding needs seed, an int64 "
                    "tensor without dimensions: torch.ops.cgx.draw_seed(torch.empty(0))");
  }
}

// Calls start(collective) on the call of cgx.h that reduces input into output.
template <typename Start>
void with_collective(const at::Tensor& input, const at::Tensor& output,
                     const std::optional<at::Tensor>& seed, const Options& options, Start&& start) {
  cgx_segment_t segment{};
  segment.numel = input.numel();
  segment.bucket_size = options.bucket_size;
  segment.bits = static_cast<int32_t>(options.bits);

  cgx_collective_t collective = options.collective();
  collective.comm = find_communicator(options.group_name);
  collective.dtype = cgx_dtype(input.scalar_type());
  collective.seed =
      options.stochastic() ? derive(seed->item<int64_t>(), options.depth) : int64_t{0};
  collective.input = input.const_data_ptr();
  collective.output = output.mutable_data_ptr();
  collective.segments = &segment;
  collective.num_segments = 1;

  check(start(&collective));
}

c10::intrusive_ptr<Work> launch(const at::Tensor& input, const at::Tensor& output,
                                const std::optional<at::Tensor>& seed, const Options& options) {
  cgx_request_t* request = nullptr;
  with_collective(input, output, seed, options, [&](const cgx_collective_t* collective) {
    return cgx_start(collective, /*callback=*/nullptr, /*context=*/nullptr, &request);
  });
  return c10::make_intrusive<Work>(request, input, output);
}

}  // namespace

void run(const at::Tensor& input, const at::Tensor& output, const std::optional<at::Tensor>& seed,
         const Options& options) {
  with_collective(input, output, seed, options, cgx_run);
}

at::Tensor draw_seed(const at::Tensor& /*distinct*/) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return at::scalar_tensor(static_cast<int64_t>(generator->random64()),
                           at::TensorOptions().dtype(at::kLong).device(at::kCPU));
}

at::Tensor draw_seed_meta(const at::Tensor& distinct) {
  return at::empty({}, distinct.options().dtype(at::kLong));
}

at::Tensor all_reduce_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                          int64_t bucket_size, std::string_view op, std::string_view rounding,
                          std::string_view algorithm, int64_t gather_bits,
                          bool skip_incomplete_buckets, int64_t minimal_size, std::string_view name,
                          int64_t depth, std::string_view group_name) {
  const Options options(bits, bucket_size, op, rounding, algorithm, gather_bits,
                        skip_incomplete_buckets, minimal_size, name, depth, group_name);
  check_call(x, seed, options);

  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input, at::MemoryFormat::Contiguous);
  run(input, output, seed, options);
  return output;
}

at::Tensor start_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                     int64_t bucket_size, std::string_view op, std::string_view rounding,
                     std::string_view algorithm, int64_t gather_bits, bool skip_incomplete_buckets,
                     int64_t minimal_size, std::string_view name, int64_t depth,
                     std::string_view group_name) {
  return borrow_cpu(x.clone(at::MemoryFormat::Contiguous), seed, bits, bucket_size, op, rounding,
                    algorithm, gather_bits, skip_incomplete_buckets, minimal_size, name, depth,
                    group_name);
}

at::Tensor borrow_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                      int64_t bucket_size, std::string_view op, std::string_view rounding,
                      std::string_view algorithm, int64_t gather_bits, bool skip_incomplete_buckets,
                      int64_t minimal_size, std::string_view name, int64_t depth,
                      std::string_view group_name) {
  const Options options(bits, bucket_size, op, rounding, algorithm, gather_bits,
                        skip_incomplete_buckets, minimal_size, name, depth, group_name);
  check_call(x, seed, options);
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input, at::MemoryFormat::Contiguous);
  c10d::register_work(output, launch(input, output, seed, options));
  return output;
}

at::Tensor all_reduce_meta(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                           int64_t bucket_size, std::string_view op, std::string_view rounding,
                           std::string_view algorithm, int64_t gather_bits,
                           bool skip_incomplete_buckets, int64_t minimal_size,
                           std::string_view name, int64_t depth, std::string_view group_name) {
  const Options options(bits, bucket_size, op, rounding, algorithm, gather_bits,
                        skip_incomplete_buckets, minimal_size, name, depth, group_name);
  check_call(x, seed, options);

  return at::empty_symint(x.sym_sizes(), x.options());
}

}  // namespace cgx::torch_ops
