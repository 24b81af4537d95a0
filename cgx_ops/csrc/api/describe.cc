// The functions of cgx.h, section 2, that describe this build and the MPI library.
#include "algorithm/algorithm.h"
#include "api/api.h"
#include "cgx/verb.h"
#include "compressor/codec.h"
#include "device/group.h"
#include "kernel/kernels.h"
#include "transport/mpi.h"

namespace {

using namespace cgx;

// Formats rows of {"name": ..., "description": ...}. Both are constants without characters that
// JSON escapes.
template <typename Table>
std::string describe_rows(const Table& table) {
  std::string rows;
  for (const auto& row : table)
    rows += join(rows.empty() ? "" : ", ", "{\"name\": \"", row.name, "\", \"description\": \"",
                 row.description, "\"}");
  return "[" + rows + "]";
}

std::string describe() {
  std::string targets;
  for (const auto* target : available_kernels())
    targets += join(targets.empty() ? "\"" : ", \"", target->name, "\"");
  return join("{\"version\": \"", CGX_VERSION, "\", \"cpu_target\": \"", kernels().name,
              "\", \"cpu_targets\": [", targets,
              "], \"transports\": ", describe_rows(transport_table()),
              ", \"compressors\": ", describe_rows(codec_table()),
              ", \"wires\": ", describe_rows(device::wire_table()),
              ", \"algorithms\": ", describe_rows(algorithm_table()),
              ", \"cuda\": ", device::describe_devices(), "}");
}

// The algorithms that a config can select for a collective.
std::string algorithms_of(const Verb& verb) {
  std::string names;
  for (const AlgorithmEntry& entry : algorithm_table()) {
    const bool levels = verb.algorithms == Algorithms::kLevels && entry.id == CGX_HIERARCHICAL;
    if (verb.algorithms == Algorithms::kAll || levels || entry.id == CGX_SRA)
      names += join(names.empty() ? "\"" : ", \"", entry.name, "\"");
  }
  return names;
}

std::string describe_verbs() {
  std::string rows;
  for (const Verb& verb : kVerbs) {
    rows += join(rows.empty() ? "" : ", ", "{\"id\": ", verb.id, ", \"name\": \"", verb.name, "\"");
    const auto add = [&](const char* name, bool value) {
      rows += join(", \"", name, "\": ", value ? "true" : "false");
    };
    add("blocks_in", verb.blocks_in);
    add("blocks_out", verb.blocks_out);
    add("reduces", verb.reduces);
    add("scatters", verb.scatters);
    add("gathers", verb.gathers);
    add("lists", verb.lists);
    add("shards", verb.shards());
    add("residuals", verb.residuals);
    rows += join(", \"algorithms\": [", algorithms_of(verb), "]}");
  }
  return "[" + rows + "]";
}

std::string describe_mpi() {
  Mpi& mpi = open_mpi();
  return join("{\"library\": \"", mpi.library(),
              "\", \"cuda_aware\": ", mpi.cuda_aware() ? "true" : "false", "}");
}

}  // namespace

cgx_status_t cgx_describe(const char** text) {
  return guarded([&] {
    thread_local std::string described;
    described = describe();
    *text = described.c_str();
  });
}

const char* cgx_verbs(void) {
  static const std::string text = describe_verbs();
  return text.c_str();
}

cgx_status_t cgx_describe_mpi(const char** text) {
  return guarded([&] {
    thread_local std::string described;
    described = describe_mpi();
    *text = described.c_str();
  });
}

cgx_status_t cgx_set_mpi_path(const char* path) {
  return guarded([&] {
    require(path != nullptr, CGX_INVALID_ARGUMENT, "path is a null pointer");
    set_mpi_path(path);
  });
}
