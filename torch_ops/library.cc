// The operators of torch.ops.cgx: schemas and implementations. Also the Python module
// cgx_ops._torch_ops, whose import registers them.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "all_to_all.h"
#include "allreduce.h"
#include "carried.h"
#include "cgx/cgx.h"
#include "coalesced.h"
#include "kernels.h"
#include "raising.h"
#include "sharded.h"
#include "status.h"
#include "tracing.h"
#include "work.h"

namespace cgx::torch_ops {

// Parts that schemas share.
#define CGX_FIRST_OPTIONS "int? bits=None, int? bucket_size=None, "
#define CGX_OTHER_OPTIONS                                                               \
  "str group_name=\"\", *, str? compressor=None, str? rounding=None, str config=\"\", " \
  "str name=\"\", str carrier=\"native\""
#define CGX_PUBLIC_OPTIONS CGX_FIRST_OPTIONS "str op=\"sum\", " CGX_OTHER_OPTIONS

// `call` is a text of Options::pack(). Inductor requires "all_reduce", "reduce_scatter" or
// "all_gather" in the name, and the group as the last argument.
#define CGX_ALL_REDUCE_SCHEMA "(Tensor x, Tensor? seed, str call, str group_name) -> Tensor"
#define CGX_COALESCED_SCHEMA \
  "(Tensor[] xs, Tensor[] residuals, Tensor? seed, str call, str group_name) -> Tensor[]"
#define CGX_REDUCE_SCATTER_SCHEMA                                                           \
  "(Tensor x, Tensor[] residuals, Tensor? seed, str call, int group_size, str group_name) " \
  "-> Tensor[]"
#define CGX_ALL_GATHER_SCHEMA \
  "(Tensor x, Tensor? seed, str call, int group_size, str group_name) -> Tensor"
#define CGX_ALL_TO_ALL_SCHEMA                                                                    \
  "(Tensor x, SymInt[] output_split_sizes, SymInt[] input_split_sizes, Tensor? seed, str call, " \
  "str group_name) -> Tensor"
#define CGX_CARRIED_OPTIONS "Tensor? seed, str call, int rank, int size, int noise_rank"

TORCH_LIBRARY(cgx, m) {
  const auto define = [&m](const char* schema,
                           const std::vector<at::Tag>& tags = {at::Tag::pt2_compliant_tag}) {
    m.def(schema, tags);
  };
  define("quantized_allreduce(Tensor x, " CGX_PUBLIC_OPTIONS ") -> Tensor");
  define("quantized_allreduce_(Tensor(a!) x, " CGX_PUBLIC_OPTIONS ") -> ()");
  define("quantized_allreduce_coalesced(Tensor[] xs, " CGX_PUBLIC_OPTIONS ") -> Tensor[]");

  define("quantized_allreduce_with_feedback(Tensor x, Tensor residual, " CGX_PUBLIC_OPTIONS
         ") -> (Tensor, Tensor)");
  define(
      "quantized_allreduce_coalesced_with_feedback(Tensor[] xs, Tensor[] "
      "residuals, " CGX_PUBLIC_OPTIONS ") -> (Tensor[], Tensor[])");

  define("quantized_reduce_scatter(Tensor x, " CGX_PUBLIC_OPTIONS ") -> Tensor");
  define("quantized_reduce_scatter_with_feedback(Tensor x, Tensor residual, " CGX_PUBLIC_OPTIONS
         ") -> (Tensor, Tensor)");
  define("quantized_all_gather(Tensor x, " CGX_FIRST_OPTIONS CGX_OTHER_OPTIONS ") -> Tensor");
  define(
      "quantized_all_to_all(Tensor x, SymInt[]? output_split_sizes=None, SymInt[]? "
      "input_split_sizes=None, " CGX_FIRST_OPTIONS CGX_OTHER_OPTIONS
      ", str grad_config=\"\") -> Tensor");

  // flexible_layout: `distinct` has no strides to keep, which checkpoints in compiled autograd
  // would check otherwise.
  const std::vector<at::Tag> draws = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded,
                                      at::Tag::flexible_layout};
  define("draw_seed(Tensor distinct) -> Tensor", draws);
  define("draw_indices(Tensor distinct, str group_name, str name) -> Tensor", draws);
  define("quantized_all_reduce" CGX_ALL_REDUCE_SCHEMA);
  define("quantized_all_reduce_start" CGX_ALL_REDUCE_SCHEMA);
  define("quantized_all_reduce_start.borrow" CGX_ALL_REDUCE_SCHEMA);
  define("quantized_all_reduce_coalesced" CGX_COALESCED_SCHEMA);
  define("quantized_all_reduce_coalesced_start" CGX_COALESCED_SCHEMA);

  for (const std::string form : {"", "_start", "_start.borrow"}) {
    define(("quantized_reduce_scatter_tensor" + form + CGX_REDUCE_SCATTER_SCHEMA).c_str());
    define(("quantized_all_gather_into_tensor" + form + CGX_ALL_GATHER_SCHEMA).c_str());
    define(("quantized_all_to_all_single" + form + CGX_ALL_TO_ALL_SCHEMA).c_str());
  }

  define("carried_encode(Tensor[] xs, Tensor[] residuals, int bytes, " CGX_CARRIED_OPTIONS
         ") -> Tensor[]");
  define(
      "carried_reduce(Tensor[] xs, Tensor[] residuals, Tensor arrived, int "
      "bytes, " CGX_CARRIED_OPTIONS ") -> Tensor[]");
  define("carried_decode(Tensor[] like, Tensor gathered, " CGX_CARRIED_OPTIONS ") -> Tensor[]");
}

#undef CGX_ALL_TO_ALL_SCHEMA
#undef CGX_ALL_GATHER_SCHEMA
#undef CGX_REDUCE_SCATTER_SCHEMA
#undef CGX_COALESCED_SCHEMA
#undef CGX_ALL_REDUCE_SCHEMA
#undef CGX_CARRIED_OPTIONS
#undef CGX_PUBLIC_OPTIONS
#undef CGX_OTHER_OPTIONS
#undef CGX_FIRST_OPTIONS

TORCH_LIBRARY_IMPL(cgx, CompositeImplicitAutograd, m) {
  impl_raising<quantized_allreduce>(m, "quantized_allreduce");
  impl_raising<quantized_allreduce_>(m, "quantized_allreduce_");
  impl_raising<quantized_allreduce_coalesced>(m, "quantized_allreduce_coalesced");
  impl_raising<quantized_allreduce_with_feedback>(m, "quantized_allreduce_with_feedback");
  impl_raising<quantized_allreduce_coalesced_with_feedback>(
      m, "quantized_allreduce_coalesced_with_feedback");
  impl_raising<quantized_reduce_scatter>(m, "quantized_reduce_scatter");
  impl_raising<quantized_reduce_scatter_with_feedback>(m, "quantized_reduce_scatter_with_feedback");
  impl_raising<quantized_all_gather>(m, "quantized_all_gather");
  impl_raising<quantized_all_to_all>(m, "quantized_all_to_all");
}

// No operator is tagged cudagraph_unsafe; torch's own collectives are not either. Compilers capture
// a start and its wait in a CUDA graph. The tag would exclude the start but not the wait, which is
// torch's operator. If a communicator or a collective (all_to_all) does not support capture, the
// core returns an error.
static void impl_collectives(torch::Library& m) {
  impl_raising<all_reduce_kernel>(m, "quantized_all_reduce");
  impl_raising<start_kernel>(m, "quantized_all_reduce_start");
  impl_raising<borrow_kernel>(m, "quantized_all_reduce_start.borrow");
  impl_raising<all_reduce_coalesced_kernel>(m, "quantized_all_reduce_coalesced");
  impl_raising<start_coalesced_kernel>(m, "quantized_all_reduce_coalesced_start");
  impl_raising<reduce_scatter_kernel>(m, "quantized_reduce_scatter_tensor");
  impl_raising<start_reduce_scatter_kernel>(m, "quantized_reduce_scatter_tensor_start");
  impl_raising<borrow_reduce_scatter_kernel>(m, "quantized_reduce_scatter_tensor_start.borrow");
  impl_raising<all_gather_kernel>(m, "quantized_all_gather_into_tensor");
  impl_raising<start_all_gather_kernel>(m, "quantized_all_gather_into_tensor_start");
  impl_raising<borrow_all_gather_kernel>(m, "quantized_all_gather_into_tensor_start.borrow");
  impl_raising<all_to_all_kernel>(m, "quantized_all_to_all_single");
  impl_raising<start_all_to_all_kernel>(m, "quantized_all_to_all_single_start");
  impl_raising<borrow_all_to_all_kernel>(m, "quantized_all_to_all_single_start.borrow");
  impl_raising<carried_encode_kernel>(m, "carried_encode");
  impl_raising<carried_reduce_kernel>(m, "carried_reduce");
  impl_raising<carried_decode_kernel>(m, "carried_decode");
}

TORCH_LIBRARY_IMPL(cgx, CPU, m) {
  impl_collectives(m);
  m.impl("draw_seed", draw_seed_cpu);
  m.impl("draw_indices", draw_indices_cpu);
}

TORCH_LIBRARY_IMPL(cgx, CUDA, m) {
  impl_collectives(m);
  m.impl("draw_seed", draw_seed_cuda);
}

TORCH_LIBRARY_IMPL(cgx, Meta, m) {
  m.impl("draw_seed", draw_seed_meta);
  m.impl("draw_indices", draw_indices_meta);
  m.impl("quantized_all_reduce", all_reduce_meta);
  m.impl("quantized_all_reduce_start", all_reduce_meta);
  m.impl("quantized_all_reduce_start.borrow", all_reduce_meta);
  m.impl("quantized_all_reduce_coalesced", all_reduce_coalesced_meta);
  m.impl("quantized_all_reduce_coalesced_start", all_reduce_coalesced_meta);
  for (const std::string form : {"", "_start", "_start.borrow"}) {
    m.impl(("quantized_reduce_scatter_tensor" + form).c_str(), reduce_scatter_meta);
    m.impl(("quantized_all_gather_into_tensor" + form).c_str(), all_gather_meta);
    m.impl(("quantized_all_to_all_single" + form).c_str(), all_to_all_meta);
  }
  m.impl("carried_encode", carried_encode_meta);
  m.impl("carried_reduce", carried_reduce_meta);
  m.impl("carried_decode", carried_decode_meta);
}

}  // namespace cgx::torch_ops

namespace {

// Never destroyed: tracing may outlive the interpreter's objects.
pybind11::function* trace_callback = nullptr;

void call_trace_callback() {
  const pybind11::gil_scoped_acquire gil;
  if ((*trace_callback)().cast<bool>()) cgx::torch_ops::set_trace_hook(nullptr);
}

pybind11::function* start_report = nullptr;  // never destroyed

void call_start_report(const char* what, const std::string& config, int64_t rank, int64_t size,
                       const char* transport) {
  const pybind11::gil_scoped_acquire gil;
  (*start_report)(what, config, rank, size, transport);
}

pybind11::function* find_group = nullptr;  // never destroyed

int32_t call_find_group(const std::string& name) {
  const pybind11::gil_scoped_acquire gil;
  return (*find_group)(name).cast<int32_t>();
}

pybind11::function* size_group = nullptr;  // never destroyed

int64_t call_size_group(const std::string& name) {
  const pybind11::gil_scoped_acquire gil;
  return (*size_group)(name).cast<int64_t>();
}

pybind11::function* make_error = nullptr;  // never destroyed

// The caller holds the GIL.
void set_error(const cgx::torch_ops::RankFailure& failure) {
  const pybind11::object error =
      (*make_error)(static_cast<int>(failure.status), failure.what_without_backtrace());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

// For all but operators (raising.h). Registered before torch's own translator, which would treat a
// RankFailure as any DistBackendError.
void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(std::move(thrown));
  } catch (const cgx::torch_ops::RankFailure& failure) {
    set_error(failure);
  }
}

}  // namespace

namespace cgx::torch_ops {

void bind_backend(pybind11::module_& module);  // backend_module.cc

void raise(const RankFailure& failure) {
  if (!make_error) throw RankFailure(failure);
  const pybind11::gil_scoped_acquire gil;
  set_error(failure);
  throw pybind11::error_already_set();
}

}  // namespace cgx::torch_ops

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
  m.def(
      "find_groups_by",
      [](pybind11::function finder, pybind11::function sizer) {
        find_group = new pybind11::function(std::move(finder));
        size_group = new pybind11::function(std::move(sizer));
        cgx::torch_ops::find_groups_by(call_find_group, call_size_group);
      },
      pybind11::arg("finder"), pybind11::arg("sizer"),
      "Set the functions that find groups: finder(group_name) returns the communicator id of a "
      "group (of all ranks for an empty name); sizer(group_name) returns its number of ranks.");
  m.def(
      "make_errors_by",
      [](pybind11::function maker) {
        make_error = new pybind11::function(std::move(maker));
        pybind11::register_exception_translator(translate);
      },
      pybind11::arg("maker"),
      "Set maker(status, text), which makes the exception of a failure among ranks. Once per "
      "process.");
  m.def(
      "report_start_by",
      [](pybind11::function report) {
        start_report = new pybind11::function(std::move(report));
        cgx::torch_ops::report_start_by(call_start_report);
      },
      pybind11::arg("report"),
      "Set report(what, config, rank, size, transport), which is called when the operators, or the "
      "backend's exact reduce_scatter, are first used.");
  m.def(
      "start",
      [](uintptr_t collective, const at::Tensor& input, const at::Tensor& output,
         std::vector<at::Tensor> residuals, bool asynchronous) {
        const auto& call = *reinterpret_cast<const cgx_collective_t*>(collective);
        return cgx::torch_ops::start(
            call, {.input = input, .output = output, .residuals = std::move(residuals)},
            cgx::torch_ops::torch_verb(call.verb).type, asynchronous);
      },
      pybind11::arg("collective"), pybind11::arg("input"), pybind11::arg("output"),
      pybind11::arg("residuals"), pybind11::arg("asynchronous"),
      pybind11::call_guard<pybind11::gil_scoped_release>(),
      "Start the cgx_collective_t at this address, on these tensors' memory, and return its Work. "
      "If not asynchronous, CUDA tensors use the current stream.");
  cgx::torch_ops::bind_backend(m);
}
