// The Python module cgx_ops._xla_ffi: what cgx_ops.jax needs to register the handlers with XLA.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>

#include "cgx/cgx.h"
#include "groups.h"
#include "handlers.h"
#include "site.h"

namespace nb = nanobind;
namespace ffi = cgx::xla::ffi;

namespace {

// What XLA must know of a handler's state.
template <typename T>
nb::dict StateType() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<T>();
  nb::dict type;
  type["type_id"] = nb::capsule(&T::id);
  type["type_info"] = nb::capsule(&info);
  return type;
}

// The gates of cgx_ops/jax/overlap.py. It does nothing: what matters is that XLA runs it when all
// of its operands are there, and that its results are in their buffers.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Gate, [](ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); },
    ffi::Ffi::Bind().RemainingArgs().RemainingRets());

}  // namespace

NB_MODULE(_xla_ffi, module) {
  using namespace cgx::xla;  // NOLINT: the whole module is about it
  module.doc() = "XLA FFI handlers of cgx_ops.jax";

  module.def("collective_handlers", [] {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(&CollectiveInstantiate));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(&CollectiveExecute));
    return stages;
  });
  module.def("cuda_collective_handlers", [] {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(&CudaCollectiveInstantiate));
    stages["execute"] = nb::capsule(reinterpret_cast<void*>(&CudaCollectiveExecute));
    return stages;
  });
  module.def("carried_handlers", [] {
    nb::dict handlers;
    handlers["cgx_carried_sum"] = nb::capsule(reinterpret_cast<void*>(&CarriedSum));
    handlers["cgx_carried_round"] = nb::capsule(reinterpret_cast<void*>(&CarriedRound));
    handlers["cgx_carried_encode"] = nb::capsule(reinterpret_cast<void*>(&CarriedEncode));
    handlers["cgx_carried_reduce"] = nb::capsule(reinterpret_cast<void*>(&CarriedReduce));
    handlers["cgx_carried_decode"] = nb::capsule(reinterpret_cast<void*>(&CarriedDecode));
    return handlers;
  });
  module.def("allreduce_q_handler",
             [] { return nb::capsule(reinterpret_cast<void*>(&AllreduceQ)); });
  module.def("gate_handler", [] { return nb::capsule(reinterpret_cast<void*>(&Gate)); });
  module.def("cuda_allreduce_q_handler",
             [] { return nb::capsule(reinterpret_cast<void*>(&CudaAllreduceQ)); });
  module.def("site_type", &StateType<Site>);
  module.def("cuda_site_type", &StateType<CudaSite>);
  module.def("compilation_begins", &CompilationBegins);
  module.def("compilation_ends", &CompilationEnds);
  module.def("set_local_timeout", &SetLocalTimeout, nb::arg("seconds"));
  module.def("set_cuda_devices", &SetCudaDevices, nb::arg("ids"));
  module.def("set_world", &SetWorld, nb::arg("comm"));
  module.def("version", [] { return cgx_version(); });
}
