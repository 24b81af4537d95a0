#include "base/env.h"

#include <strings.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/status.h"

namespace cgx {
namespace {

constexpr double kDefaultTimeoutSeconds = 300;
constexpr int kMost = std::numeric_limits<int>::max();
constexpr size_t kLongestHostId = 64;

// Parses the whole text as a number, independently of the locale.
template <typename Number>
bool parse(const std::string& text, Number* number) {
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, *number);
  return result.ec == std::errc() && result.ptr == end;
}

}  // namespace

std::optional<std::string> env_string(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

double env_seconds(const char* name, double otherwise) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return otherwise;
  double seconds = 0;
  require(parse(*text, &seconds) && std::isfinite(seconds) && seconds > 0, CGX_INVALID_ARGUMENT,
          name, "=\"", *text, "\": give a number of seconds greater than 0, such as 300 or 0.5");
  return seconds;
}

std::optional<int> env_integer(const char* name, int lowest, int highest) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return std::nullopt;
  int number = 0;
  require(parse(*text, &number) && number >= lowest && number <= highest, CGX_INVALID_ARGUMENT,
          name, "=\"", *text, "\": give an integer from ", lowest, " to ", highest);
  return number;
}

std::string env_choice(const char* name, const std::vector<std::string>& choices,
                       const std::string& otherwise) {
  const std::optional<std::string> text = env_string(name);
  if (!text) return otherwise;
  std::string accepted;
  for (const std::string& choice : choices) {
    if (strcasecmp(choice.c_str(), text->c_str()) == 0) return choice;
    accepted += (accepted.empty() ? "" : ", ") + choice;
  }
  fail(CGX_INVALID_ARGUMENT, name, "=\"", *text, "\": give one of ", accepted);
}

std::optional<std::string> env_cpu_target() { return env_string("CGX_CPU_TARGET"); }

double env_timeout_seconds() { return env_seconds("CGX_TIMEOUT", kDefaultTimeoutSeconds); }

std::optional<std::string> env_host_id() {
  std::optional<std::string> id = env_string("CGX_HOST_ID");
  require(!id || id->size() <= kLongestHostId, CGX_INVALID_ARGUMENT, "CGX_HOST_ID=\"",
          id.value_or(""), "\": give at most ", kLongestHostId,
          " bytes, equal on the ranks of a host");
  return id;
}

std::optional<std::string> env_socket_interfaces() { return env_string("CGX_SOCKET_IFNAME"); }

const std::vector<std::string>& communicator_types() {
  static const std::vector<std::string> types = {"AUTO", "SHM", "MPI", "TCP", "NCCL"};
  return types;
}

std::string env_transport() {
  return env_choice("COMMUNICATOR_TYPE", communicator_types(), "AUTO");
}

int64_t env_fusion_buffer_bytes() {
  constexpr int kMostMegabytes = 1 << 20;
  return int64_t{env_integer("CGX_FUSION_BUFFER_SIZE_MB", 1, kMostMegabytes).value_or(64)} << 20;
}

std::optional<int> env_threads() { return env_integer("CGX_THREADS", 1, 1024); }

int env_ranks_on_host() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"})
    if (const auto ranks = env_integer(name, 1, kMost)) return *ranks;
  return 1;
}

std::optional<MpirunWorld> env_mpirun_world() {
  const std::optional<int> size = env_integer("OMPI_COMM_WORLD_SIZE", 1, kMost);
  if (!size) return std::nullopt;
  const std::optional<int> rank = env_integer("OMPI_COMM_WORLD_RANK", 0, *size - 1);
  require(rank.has_value(), CGX_INVALID_ARGUMENT, "OMPI_COMM_WORLD_SIZE is set to ", *size,
          " but OMPI_COMM_WORLD_RANK is not set: launch the process with mpirun, or unset "
          "OMPI_COMM_WORLD_SIZE");
  return MpirunWorld{*rank, *size};
}

}  // namespace cgx
