// Python bindings of the backend "cgx". cgx_ops/torch/backend/process_group.py uses and documents
// them.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "cgx/completion_pool.h"

namespace py = pybind11;

namespace cgx::torch_ops {
namespace {

constexpr auto kLogger = "cgx_ops.torch.backend";

// Never destroyed: collectives may outlive the interpreter's objects.
py::object& logger() {
  static auto* logger = new py::object(py::module_::import("logging").attr("getLogger")(kLogger));
  return *logger;
}

using InnerByName = std::map<std::string, Backend::BackendRef>;

Backend::Inner by_device(const InnerByName& inner) {
  Backend::Inner all;
  for (const auto& [device, backend] : inner) all[at::Device(device).type()] = backend;
  return all;
}

std::optional<Backend::Reconfigurations> reconfigurations_of(const py::object& given) {
  if (given.is_none()) return std::nullopt;
  using Reconfigurations = Backend::Reconfigurations;
  using Connected = std::tuple<int, int, int32_t, InnerByName>;
  const auto connect = given.attr("reconfigure")
                           .cast<std::function<Connected(const Reconfigurations::Handles&, int64_t,
                                                         std::optional<Backend::Milliseconds>,
                                                         Reconfigurations::Disconnect)>>();
  return Reconfigurations{given.attr("handle").cast<std::function<std::string()>>(),
                          [connect](const Reconfigurations::Handles& handles, int64_t uuid,
                                    std::optional<Backend::Milliseconds> timeout,
                                    Reconfigurations::Disconnect disconnect) {
                            const auto [rank, size, comm, inner] =
                                connect(handles, uuid, timeout, std::move(disconnect));
                            return Backend::Members{rank, size, comm, by_device(inner)};
                          }};
}

}  // namespace

// Asks Python once a second, so that a call costs only a clock read if debug logging is off.
bool debug_wanted() {
  using Clock = std::chrono::steady_clock;
  static std::atomic<Clock::rep> asked_again_at{0};
  static std::atomic<bool> wanted{false};
  const auto now = Clock::now().time_since_epoch().count();
  if (now >= asked_again_at) {
    asked_again_at = now + Clock::duration(std::chrono::seconds(1)).count();
    const py::gil_scoped_acquire gil;
    wanted = logger().attr("isEnabledFor")(10).cast<bool>();  // logging.DEBUG
  }
  return wanted;
}

void debug(const std::string& line) {
  const py::gil_scoped_acquire gil;
  logger().attr("debug")("%s", line);
}

void warn(const std::string& line) {
  const py::gil_scoped_acquire gil;
  logger().attr("warning")("%s", line);
}

void without_lock(const std::function<void()>& work) {
  if (PyGILState_Check() == 0) return work();
  const py::gil_scoped_release no_gil;
  work();
}

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // registers the base classes of these bindings
  logger();  // initialize here: an import during the initialization of a static could deadlock

  using Larger = std::tuple<int64_t, int64_t, std::shared_ptr<Compression>>;
  py::class_<Compression, std::shared_ptr<Compression>>(module, "Compression")
      .def(py::init([](const char* config, int64_t seed, const std::vector<Larger>& larger) {
             std::vector<Compression::Larger> by_size;
             for (const auto& [numel, element_bytes, compression] : larger) {
               by_size.push_back({numel, element_bytes, compression});
             }
             return std::make_shared<Compression>(config, seed, std::move(by_size));
           }),
           py::arg("config"), py::arg("seed"), py::arg("larger") = std::vector<Larger>());

  py::enum_<Scope::Kind>(module, "ScopeKind")
      .value("NONE", Scope::Kind::kNone)
      .value("COMPRESSED", Scope::Kind::kCompressed)
      .value("UNCOMPRESSED", Scope::Kind::kUncompressed);
  py::class_<Scope>(module, "Scope")
      .def(py::init([](Scope::Kind kind, std::shared_ptr<Compression> compression) {
             return Scope{kind, std::move(compression)};
           }),
           py::arg("kind"), py::arg("compression") = nullptr);
  module.def("exchange_scope", exchange_scope, py::arg("scope"),
             "Set the calling thread's scope and return the previous one.");

  py::enum_<Automatic>(module, "Automatic")
      .value("GRADIENTS", Automatic::kGradients)
      .value("EVERYTHING", Automatic::kEverything)
      .value("NOTHING", Automatic::kNothing);
  using Options = Backend::Options;
  py::class_<Options, c10::intrusive_ptr<Options>, c10d::Backend::Options>(module, "Options")
      .def(py::init([](std::shared_ptr<Compression> compression, Automatic automatic,
                       Backend::Milliseconds timeout) {
             return c10::make_intrusive<Options>(std::move(compression), automatic, timeout);
           }),
           py::arg("compression"), py::arg("automatic"), py::arg("timeout"))
      .def_readwrite("automatic", &Options::automatic)
      .def("set_compression",
           [](Options& self, std::shared_ptr<Compression> compression) {
             self.compression = std::move(compression);
           })
      .def("__deepcopy__", [](const Options& self, const py::dict& /*memo*/) {
        return c10::make_intrusive<Options>(self);
      });

  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "Backend")
      .def(py::init([](int rank, int size, int32_t communicator, const InnerByName& inner,
                       bool cuda, c10::intrusive_ptr<Options> options,
                       Backend::MakeBackend make_backend, const py::object& reconfigurations) {
             return c10::make_intrusive<Backend>(rank, size, communicator, by_device(inner), cuda,
                                                 std::move(options), std::move(make_backend),
                                                 reconfigurations_of(reconfigurations));
           }),
           py::arg("rank"), py::arg("size"), py::arg("communicator"), py::arg("inner"),
           py::arg("cuda"), py::arg("options"), py::arg("make_backend"),
           py::arg("reconfigurations") = py::none())
      .def_property_readonly("communicator", &Backend::communicator)
      .def_property_readonly("_timeout",
                             [](Backend& self) { return self.getBackendOptions()->timeout; })
      // torch calls it on ranks outside of a new group, if the backend supports splitting.
      .def(
          "perform_nocolor_split", [](Backend&, const py::object& /*device*/) {},
          py::arg("device"));

  module.def(
      "drain",
      [](double seconds) { CompletionPool::get().drain(std::chrono::duration<double>(seconds)); },
      py::arg("seconds"), py::call_guard<py::gil_scoped_release>(),
      "Wait until no future callback runs, or the given seconds have passed.");
}

}  // namespace cgx::torch_ops
