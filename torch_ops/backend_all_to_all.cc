// The backend's all_to_all_single in the core.
#include <ATen/core/LegacyTypeDispatch.h>

#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "backend.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

// Returns the elements of each rank's block. Throws unless the blocks fill the tensor.
std::vector<int64_t> block_elements(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                                    int ranks) {
  c10d::checkSplitSizes(rows, tensor, ranks);
  std::vector<int64_t> elements(ranks), offsets(ranks);
  c10d::computeLengthsAndOffsets(rows, tensor, &elements, &offsets);
  return elements;
}

}  // namespace

Backend::WorkRef Backend::exchange_in_core(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_sizes,
                                           const std::vector<int64_t>& input_sizes,
                                           const c10d::AllToAllOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Decision decision = decide_exchange(options_->compression);
  if (debug_wanted()) {
    log_decision(
        c10::str("group '", name_, "': all_to_all of ", input.numel(), " ", input.dtype().name()),
        decision);
  }
  CallBuilder call = core_call(CGX_ALL_TO_ALL, input.scalar_type(), decision, options.timeout);
  ++sequence_;
  std::vector<int64_t> sent, received;
  try {
    sent = block_elements(input, input_sizes, size_);
    received = block_elements(output, output_sizes, size_);
  } catch (const c10::Error& error) {  // perhaps on this rank only
    cgx_refuse(&call.get(), CGX_PEER_FAILED, error.what_without_backtrace());
    throw;
  }
  Buffers buffers{.input = input.contiguous(), .output = output.contiguous(), .results = {output}};
  if (!buffers.output.is_same(output))
    buffers.deliver = [from = buffers.output, output] { output.copy_(from); };
  call.fields.output = buffers.output.mutable_data_ptr();
  call.fields.input = buffers.input.const_data_ptr();
  call.fields.input_splits = sent.data();
  call.fields.output_splits = received.data();
  call.add(0);
  return coalesced(
      start(call.get(), std::move(buffers), c10d::OpType::ALLTOALL_BASE, options.asyncOp));
}

}  // namespace cgx::torch_ops
