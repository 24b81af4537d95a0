// The Python module cgx_ops._xla_ffi, with which cgx_ops.jax registers the handlers with XLA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>

#include "groups.h"
#include "handlers.h"
#include "site.h"

namespace nb = nanobind;
namespace ffi = cgx::xla::ffi;

namespace {

// The type of a handler's state, as XLA takes it.
template <typename T>
nb::dict StateType() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<T>();
  nb::dict type;
  type["type_id"] = nb::capsule(&T::id);
  type["type_info"] = nb::capsule(&info);
  return type;
}

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Handlers by target: the collectives over mesh axes have the same stages.
nb::dict CollectiveHandlers(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  nb::dict stages, handlers;
  stages["instantiate"] = Capsule(instantiate);
  stages["execute"] = Capsule(execute);
  for (const char* target :
       {"cgx_psum_q", "cgx_psum_scatter_q", "cgx_all_gather_q", "cgx_all_to_all_q"})
    handlers[target] = stages;
  return handlers;
}

// The gates of cgx_ops/jax/_src/collectives/overlap.py. This handler does nothing, but XLA runs it
// only when all of its operands are ready, and its results are in their buffers.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Gate, [](ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

NB_MODULE(_xla_ffi, module) {
  using namespace cgx::xla;  // NOLINT: everything here is in it
  module.doc() = "XLA FFI handlers of cgx_ops.jax";

  module.def("cpu_handlers", [] {
    nb::dict handlers = CollectiveHandlers(&CollectiveInstantiate, &CollectiveExecute);
    handlers["cgx_carried_sum"] = Capsule(&CarriedSum);
    handlers["cgx_carried_round"] = Capsule(&CarriedRound);
    handlers["cgx_carried_round_residual"] = Capsule(&CarriedRoundResidual);
    handlers["cgx_carried_encode"] = Capsule(&CarriedEncode);
    handlers["cgx_carried_reduce"] = Capsule(&CarriedReduce);
    handlers["cgx_carried_decode"] = Capsule(&CarriedDecode);
    handlers["cgx_allreduce_q"] = Capsule(&AllreduceQ);
    handlers["cgx_gate"] = Capsule(&Gate);
    return handlers;
  });
  module.def("cuda_handlers", [] {
    nb::dict handlers = CollectiveHandlers(&CudaCollectiveInstantiate, &CudaCollectiveExecute);
    handlers["cgx_allreduce_q"] = Capsule(&CudaAllreduceQ);
    return handlers;
  });
  module.def("site_type", &StateType<Site>);
  module.def("cuda_site_type", &StateType<CudaSite>);
  module.def("compilation_begins", &CompilationBegins);
  module.def("compilation_ends", &CompilationEnds);
  module.def("set_local_timeout", &SetLocalTimeout, nb::arg("seconds"));
  module.def("set_cuda_devices", &SetCudaDevices, nb::arg("ids"));
  module.def("set_world", &SetWorld, nb::arg("comm"));
}
