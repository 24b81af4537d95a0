// The kernels under the public operators: draw a seed, run or start a collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cgx/cgx.h"
#include "options.h"
#include "work.h"

namespace cgx::torch_ops {

// Returns the communicator's id of a process group that has none under its own name, and of all
// ranks for an empty name; throws if there is none.
using GroupFinder = int32_t (*)(const std::string& group_name);
// Returns the number of ranks of such a group; connects no ranks of a process group.
using GroupSizer = int64_t (*)(const std::string& group_name);
// Has collectives ask these. Before the first of them.
void find_groups_by(GroupFinder finder, GroupSizer sizer);
int64_t group_size(const std::string& group_name);

// Logs that something starts to communicate: what, its configuration (a text of cgx_config_parse),
// the rank, the number of ranks, and what moves the bytes.
using StartReport = void (*)(const char* what, const std::string& config, int64_t rank,
                             int64_t size, const char* transport);
void report_start_by(StartReport report);
// Call the report, each once per process: for the operators, and for the backend's exact
// reduce_scatter, which FSDP2 uses without compress().
void report_operators(const Options& options, int64_t rank, int64_t size, const char* transport);
void report_exact_reduce_scatter(int64_t rank, int64_t size);

// In reports, instead of a transport of the core.
inline constexpr char kTorchsCollectives[] = "torch's collectives";

// Reduces `input` into `output`: contiguous, of one device, dtype and size, perhaps one tensor;
// `numels` are the sizes of the tensors that lie in it end to end. `seed` is needed if the options
// say so. They check nothing that Options::check and check_seed did. run() blocks, or puts the
// collective on the current stream; launch() does neither.
void run(const Buffers& buffers, at::IntArrayRef numels, const Seed& seed, const Options& options);
c10::intrusive_ptr<c10d::Work> launch(Buffers buffers, at::IntArrayRef numels, const Seed& seed,
                                      const Options& options);

// Throws unless there is a seed where `options` need one, on the CPU or on the device of x.
void check_seed(const at::Tensor& x, const Seed& seed, const Options& options);

// The seed of a collective: a number, or in the GPU's memory, where a graph that is recorded finds
// a new one at every replay. The core derives those of segments.
struct OwnSeed {
  int64_t number = 0;
  at::Tensor on_device;
};
OwnSeed seed_of(const Seed& seed, const Options& options);

// Where tensors lie end to end: their values, results and residuals. Null where there is none.
struct Addresses {
  const void* input = nullptr;
  void* output = nullptr;
  void* residual = nullptr;
};

// A call with `options` on `numels.size()` tensors, each a segment, without its communicator.
CallBuilder make_call(at::IntArrayRef numels, at::ScalarType dtype, const Addresses& at,
                      const OwnSeed& seed, const Options& options);

// cgx::draw_seed: an int64 scalar on the argument's device, from that device's default generator of
// torch. Otherwise the argument only tells draws apart (see draw_if_needed).
at::Tensor draw_seed_cpu(const at::Tensor& distinct);
at::Tensor draw_seed_cuda(const at::Tensor& distinct);
at::Tensor draw_seed_meta(const at::Tensor& distinct);

// cgx::draw_places: the same from a count of the calls of this name on this group, which the ranks'
// programs make alike: an equal seed on all ranks, whatever their generators are.
at::Tensor draw_places_cpu(const at::Tensor& distinct, std::string_view group_name,
                           std::string_view name);
at::Tensor draw_places_meta(const at::Tensor& distinct, std::string_view group_name,
                            std::string_view name);

// cgx::quantized_all_reduce: a new tensor with the result. As run(). These serve both the CPU and
// CUDA.
at::Tensor all_reduce_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                             std::string_view group_name);

// cgx::quantized_all_reduce_start: the same, to be read only after _c10d_functional.wait_tensor.
// Reduces from a copy of x, since who sees an ordinary operator may reuse x's memory at once.
at::Tensor start_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                        std::string_view group_name);

// cgx::quantized_all_reduce_start.borrow: for callers who leave x's memory alone until the wait.
at::Tensor borrow_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                         std::string_view group_name);

// The Meta kernel of all three: makes the same checks and starts nothing.
at::Tensor all_reduce_meta(const at::Tensor& x, const Seed& seed, std::string_view call,
                           std::string_view group_name);

}  // namespace cgx::torch_ops
