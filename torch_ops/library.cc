// The operators of torch.ops.cgx: schemas and which function serves them; and the Python module
// cgx_ops._torch_ops, whose import registers them.
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>

#include <utility>

#include "allreduce.h"
#include "cgx/cgx.h"
#include "kernels.h"

namespace cgx::torch_ops {

// The pieces that two schemas share.
#define CGX_PUBLIC_OPTIONS                                                       \
  "int bits=4, int bucket_size=512, str op=\"sum\", str group_name=\"\", *, "    \
  "str rounding=\"stochastic\", str algorithm=\"auto\", int? gather_bits=None, " \
  "bool skip_incomplete_buckets=False, int minimal_size=0, str name=\"\""

// Inductor reads two things off these: "all_reduce" in the name, and the last argument as the
// group.
#define CGX_KERNEL_SCHEMA                                                                     \
  "(Tensor x, Tensor? seed, int bits, int bucket_size, str op, str rounding, str algorithm, " \
  "int gather_bits, bool skip_incomplete_buckets, int minimal_size, str name, int depth, "    \
  "str group_name) -> Tensor"

TORCH_LIBRARY(cgx, m) {
  m.def("quantized_allreduce(Tensor x, " CGX_PUBLIC_OPTIONS ") -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("quantized_allreduce_(Tensor(a!) x, " CGX_PUBLIC_OPTIONS ") -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def("draw_seed(Tensor distinct) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def("quantized_all_reduce" CGX_KERNEL_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("quantized_all_reduce_start" CGX_KERNEL_SCHEMA, {at::Tag::pt2_compliant_tag});
  m.def("quantized_all_reduce_start.borrow" CGX_KERNEL_SCHEMA, {at::Tag::pt2_compliant_tag});
}

#undef CGX_KERNEL_SCHEMA
#undef CGX_PUBLIC_OPTIONS

TORCH_LIBRARY_IMPL(cgx, CompositeImplicitAutograd, m) {
  m.impl("quantized_allreduce", quantized_allreduce);
  m.impl("quantized_allreduce_", quantized_allreduce_);
}

TORCH_LIBRARY_IMPL(cgx, CPU, m) {
  m.impl("draw_seed", draw_seed);
  m.impl("quantized_all_reduce", all_reduce_cpu);
  m.impl("quantized_all_reduce_start", start_cpu);
  m.impl("quantized_all_reduce_start.borrow", borrow_cpu);
}

TORCH_LIBRARY_IMPL(cgx, Meta, m) {
  m.impl("draw_seed", draw_seed_meta);
  m.impl("quantized_all_reduce", all_reduce_meta);
  m.impl("quantized_all_reduce_start", all_reduce_meta);
  m.impl("quantized_all_reduce_start.borrow", all_reduce_meta);
}

}  // namespace cgx::torch_ops

namespace {

// Lives for ever: tracing may outlast the interpreter's own objects.
pybind11::function* trace_callback = nullptr;

void call_trace_callback() {
  const pybind11::gil_scoped_acquire gil;
  if ((*trace_callback)().cast<bool>()) cgx::torch_ops::set_trace_hook(nullptr);
}

}  // namespace

PYBIND11_MODULE(_torch_ops, m) {
  m.doc() = "The compiled part of cgx_ops.torch: importing it registers torch.ops.cgx.*.";
  m.attr("torch_version") = TORCH_VERSION;
  m.attr("cgx_version") = cgx_version();
  m.def(
      "on_trace",
      [](pybind11::function callback) {
        trace_callback = new pybind11::function(std::move(callback));
        cgx::torch_ops::set_trace_hook(call_trace_callback);
      },
      pybind11::arg("callback"),
      "Call callback() whenever an operator is traced, until it returns True. Once per process.");
}
