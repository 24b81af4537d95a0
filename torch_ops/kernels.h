// Kernels under the public operators: draw a seed, and run or start a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cgx/cgx.h"
#include "options.h"
#include "work.h"

namespace cgx::torch_ops {

// Returns the communicator id for a process group without a communicator of the same name, or for
// all ranks if the name is empty. Throws if there is none.
using GroupFinder = int32_t (*)(const std::string& group_name);
// Returns the number of ranks of such a group, without connecting them.
using GroupSizer = int64_t (*)(const std::string& group_name);
// Sets the functions that collectives use to find groups. Call it before the first collective.
void find_groups_by(GroupFinder finder, GroupSizer sizer);
int64_t group_size(const std::string& group_name);
// Throws unless the connected group has `size` ranks: graphs contain the size at compilation.
void require_size(const Options& options, int64_t size);

// Logs the first communication: what communicates, its config (a text for cgx_config_parse), the
// rank, the number of ranks, and the transport.
using StartReport = void (*)(const char* what, const std::string& config, int64_t rank,
                             int64_t size, const char* transport);
void report_start_by(StartReport report);
// Call the report, each once per process: for the operators, and for the backend's uncompressed
// reduce_scatter, which FSDP2 uses without compress().
void report_operators(const Options& options, int64_t rank, int64_t size, const char* transport);
void report_exact_reduce_scatter(int64_t rank, int64_t size);

// Replaces the core's transport in reports.
inline constexpr char kTorchsCollectives[] = "torch's collectives";

// Elements of the blocks of an all_to_all, by rank.
struct Splits {
  std::vector<int64_t> input, output;
  int64_t row;  // elements of a row
};

// Runs or starts the collective of `options`. Input and output are contiguous, on one device and of
// one dtype; in an allreduce they may be the same tensor. `numels` are the sizes of the tensors
// packed in a block; {0} with `splits`.
// Options::check and check_seed must have been called. run() blocks (CPU) or enqueues on the
// current stream (CUDA); launch() does neither.
void run(const Buffers& buffers, at::IntArrayRef numels, const Seed& seed, const Options& options,
         const Splits* splits = nullptr);
c10::intrusive_ptr<c10d::Work> launch(Buffers buffers, at::IntArrayRef numels, const Seed& seed,
                                      const Options& options, const Splits* splits = nullptr);

// Announces that this rank will not start a call on x, so that the others do not wait. `call` has
// the verb and the communicator.
void refuse(CallBuilder call, const at::Tensor& x, const c10::Error& error);

// Runs `check`, and refuses the call if it throws: for arguments that may be invalid on one rank
// only.
void or_refuse(const Options& options, const at::Tensor& x, const std::function<void()>& check);

// Throws unless there is a seed on the CPU or on x's device, if `options` need one.
void check_seed(const at::Tensor& x, const Seed& seed, const Options& options);

// The seed of a collective: a number, or an address in GPU memory, which a replayed CUDA graph
// reads again. The core derives the segments' seeds from it.
struct OwnSeed {
  int64_t number = 0;
  at::Tensor on_device;
};
OwnSeed seed_of(const Seed& seed, const Options& options);

// Addresses of the packed values, results and residuals. Null if there are none.
struct Addresses {
  const void* input = nullptr;
  void* output = nullptr;
  void* residual = nullptr;
};

// Builds a call of one segment per entry of `numels`. Does not set the communicator.
CallBuilder make_call(at::IntArrayRef numels, at::ScalarType dtype, const Addresses& at,
                      const OwnSeed& seed, const Options& options);

// cgx::draw_seed: an int64 scalar from the default torch generator of the argument's device.
// Distinct arguments keep compilers from merging draws (see draw_if_needed).
at::Tensor draw_seed_cpu(const at::Tensor& distinct);
at::Tensor draw_seed_cuda(const at::Tensor& distinct);
at::Tensor draw_seed_meta(const at::Tensor& distinct);

// cgx::draw_indices: a seed for randk's indices that is equal on all ranks, whatever their
// generators are. It is derived from the number of calls with this name on this group, which is
// equal on all ranks.
at::Tensor draw_indices_cpu(const at::Tensor& distinct, std::string_view group_name,
                            std::string_view name);
at::Tensor draw_indices_meta(const at::Tensor& distinct, std::string_view group_name,
                             std::string_view name);

// cgx::quantized_all_reduce: returns the result as a new tensor. Blocks as run() does. These
// functions serve the CPU and CUDA.
at::Tensor all_reduce_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                             std::string_view group_name);

// cgx::quantized_all_reduce_start: the same, but the result may be read only after
// _c10d_functional.wait_tensor. Copies x, because a compiler may reuse x's memory immediately.
at::Tensor start_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                        std::string_view group_name);

// cgx::quantized_all_reduce_start.borrow: does not copy x. The caller must leave its memory alone
// until the wait.
at::Tensor borrow_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                         std::string_view group_name);

// The Meta kernel of all three: makes the same checks and starts nothing.
at::Tensor all_reduce_meta(const at::Tensor& x, const Seed& seed, std::string_view call,
                           std::string_view group_name);

}  // namespace cgx::torch_ops
