// The backend's all_to_all_single in the core.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "backend.h"
#include "kernels.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

// Returns the elements of each rank's block. Throws unless the blocks fill the tensor.
std::vector<int64_t> block_elements(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                                    int ranks) {
  c10d::checkSplitSizes(rows, tensor, ranks);
  if (std::any_of(rows.begin(), rows.end(), [](int64_t each) { return each < 0; })) {
    C10_THROW_ERROR(ValueError, c10::str("all_to_all: the split sizes are ", rows,
                                         "; they must be at least 0"));
  }
  std::vector<int64_t> elements(ranks), offsets(ranks);
  c10d::computeLengthsAndOffsets(rows, tensor, &elements, &offsets);
  return elements;
}

}  // namespace

// Exact blocks of GPUs are NCCL's.
bool Backend::exchanged_in_core(const at::Tensor& output, const at::Tensor& input) const {
  constexpr int kMostRanks = 512;  // of the core's all_to_all on CPUs
  if (output.scalar_type() != input.scalar_type()) return false;
  if (served_on_cpu(output) && served_on_cpu(input)) return size_ <= kMostRanks;
  return served({output, input}, c10d::ReduceOp::SUM) && input.is_cuda() && output.is_cuda() &&
         decision_of(input).compression;
}

Decision Backend::decision_of(const at::Tensor& input) const {
  // The thresholds of bits="auto" were measured between CPUs.
  const auto element_bytes = input.is_cpu() ? input.element_size() : 0;
  return decide_exchange(options_->compression, kLargest, static_cast<int64_t>(element_bytes));
}

Backend::WorkRef Backend::exchange_in_core(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_sizes,
                                           const std::vector<int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Decision decision = decision_of(input);
  if (debug_wanted()) {
    log_decision(
        c10::str("group '", name_, "': all_to_all of ", input.numel(), " ", input.dtype().name()),
        decision);
  }
  CallBuilder call = core_call(CGX_ALL_TO_ALL, input.scalar_type(), decision, options.timeout);
  std::vector<int64_t> sent, received;
  Buffers buffers;
  try {
    sent = block_elements(input, input_sizes, size_);
    received = block_elements(output, output_sizes, size_);
    at::assert_no_internal_overlap(output);
    at::assert_no_overlap(output, input);
    const bool in_place = output.is_contiguous() && !output.is_neg();
    buffers = {.input = input.resolve_neg().contiguous(),
               .output = in_place ? output : at::empty(output.sizes(), output.options()),
               .results = {output}};
    if (!in_place) buffers.deliver = [from = buffers.output, output] { output.copy_(from); };
  } catch (const c10::Error& error) {  // perhaps on this rank only
    refuse(std::move(call), input, error);
    throw;
  }
  call.fields.output = buffers.output.mutable_data_ptr();
  call.fields.input = buffers.input.const_data_ptr();
  call.fields.input_splits = sent.data();
  call.fields.output_splits = received.data();
  call.add(0);
  return coalesced(
      start(call.get(), std::move(buffers), c10d::OpType::ALLTOALL_BASE, options.asyncOp));
}

}  // namespace cgx::torch_ops
