#include "options.h"

#include <array>
#include <charconv>
#include <iterator>
#include <memory>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cgx/verb.h"
#include "core.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

struct Choice {
  std::string_view text;
  int32_t value;
};

constexpr std::array<Choice, 5> kOps = {{{"sum", CGX_SUM},
                                         {"avg", CGX_AVG},
                                         {"min", CGX_MIN},
                                         {"max", CGX_MAX},
                                         {"product", CGX_PRODUCT}}};
// The value is whether torch's own collectives send the messages.
constexpr std::array<Choice, 2> kCarriers = {{{"native", 0}, {"c10d", 1}}};

template <size_t n>
int32_t choose(const std::array<Choice, n>& choices, const char* caller, const char* what,
               std::string_view text) {
  std::string known;
  for (const Choice& choice : choices) {
    if (choice.text == text) return choice.value;
    known += (known.empty() ? "'" : ", '") + std::string(choice.text) + "'";
  }
  C10_THROW_ERROR(ValueError,
                  c10::str(caller, ": ", what, " '", text, "' is unknown; use one of ", known));
}

[[noreturn]] void refuse_config(const char* caller) {
  C10_THROW_ERROR(ValueError, c10::str(caller, ": ", cgx_last_error()));
}

// ---- packed calls --------------------------------------------------------------------------

constexpr std::string_view kName = " name=";

[[noreturn]] void refuse(std::string_view call) {
  C10_THROW_ERROR(ValueError,
                  c10::str("cgx::quantized_allreduce: '", call, "' is not a packed call; ",
                           "an example is 'op=sum depth=0 bits=4 name='"));
}

// Removes "<key>value " from the front of `rest`, which is a part of `call`, and returns the value.
std::string_view take(std::string_view call, std::string_view key, std::string_view* rest) {
  const size_t end = rest->find(' ');
  if (rest->substr(0, key.size()) != key || end == rest->npos) refuse(call);
  const std::string_view value = rest->substr(key.size(), end - key.size());
  rest->remove_prefix(end + 1);
  return value;
}

struct Parsed {
  std::shared_ptr<const std::string> text;
  cgx_config_t config;
  cgx_seed_use_t seed_use;
  bool exact;
};

// Caches the last config of each thread, since calls in a loop usually share it.
const Parsed& parsed(const char* caller, std::string_view text) {
  thread_local Parsed known;
  if (known.text && *known.text == text) return known;
  auto copy = std::make_shared<const std::string>(text);
  cgx_config_t config;
  int32_t seed_use = CGX_SEED_UNUSED, exact = 0;
  if (cgx_config_parse(copy->c_str(), &config) != CGX_OK ||
      cgx_config_seed_use(&config, &seed_use) != CGX_OK ||
      cgx_config_is_exact(&config, &exact) != CGX_OK) {
    refuse_config(caller);
  }
  known = {std::move(copy), config, static_cast<cgx_seed_use_t>(seed_use), exact != 0};
  return known;
}

// ---- checks --------------------------------------------------------------------------------

bool is_linear(int32_t op) { return op == CGX_SUM || op == CGX_AVG; }

void check_tensor(const char* caller, const at::Tensor& x) {
  if (x.layout() != at::kStrided) {
    C10_THROW_ERROR(TypeError, c10::str(caller, ": the tensor has layout ", x.layout(),
                                        "; only dense tensors are supported: use x.to_dense()"));
  }
  const at::ScalarType dtype = x.scalar_type();
  if (!core_dtype(dtype)) {
    const char* remedy =
        at::isComplexType(dtype) ? "reduce torch.view_as_real(x)"
        : dtype == at::kDouble
            ? "convert it: x.float()"
            : "convert it, x.float(), if values are at most 2**24; else use torch.distributed";
    C10_THROW_ERROR(TypeError, c10::str(caller, ": the tensor is ", dtype,
                                        "; float32, float16 and bfloat16 are supported: ", remedy));
  }
  if (!x.device().is_cpu() && !x.device().is_cuda() && !x.device().is_meta()) {
    C10_THROW_ERROR(TypeError, c10::str(caller, ": the tensor is on ", x.device(),
                                        "; CPU and CUDA tensors are supported: use x.cpu()"));
  }
  // Otherwise the tangent of a dual tensor would be dropped silently.
  if (x._fw_grad(/*level=*/0).defined()) {
    C10_THROW_ERROR(NotImplementedError,
                    c10::str(caller,
                             ": forward-mode differentiation is not supported; use "
                             "reverse mode (backward) or x.detach()"));
  }
}

// ---- configs -------------------------------------------------------------------------------

// Appends a field to a config's text, if it is given.
void append(const char* field, const std::optional<int64_t>& value, std::string* text) {
  if (value) *text += c10::str(text->empty() ? "" : " ", field, "=", *value);
}

void append(const char* field, const std::optional<std::string_view>& word, int32_t verb,
            std::string* text) {
  if (!word) return;
  if (word->find('\'') != word->npos) {
    C10_THROW_ERROR(ValueError, c10::str(operator_name(verb), ": ", field, " is \"", *word,
                                         "\"; it must be one word: see cgx_ops.Config"));
  }
  *text += c10::str(text->empty() ? "" : " ", field, "='", *word, "'");
}

}  // namespace

const char* operator_name(int32_t verb) {
  static constexpr const char* kNames[] = {
      "cgx::quantized_allreduce", "cgx::quantized_reduce_scatter", "cgx::quantized_all_gather",
      "cgx::quantized_all_to_all"};
  static_assert(std::size(kNames) == std::size(kVerbs));
  return kNames[verb];
}

// Caches the last config text of each thread, since calls in a loop usually share it.
std::string_view overridden(const GivenConfig& given, int32_t verb) {
  thread_local GivenConfig known;
  thread_local std::string config, compressor, rounding, text;  // copies, because the caller's
                                                                // views may dangle
  if (!text.empty() && known == given) return text;
  text.clear();
  std::string own;
  append("bits", given.bits, &own);
  append("bucket_size", given.bucket_size, &own);
  append("compressor", given.compressor, verb, &own);
  append("rounding", given.rounding, verb, &own);
  config = given.config;
  cgx_config_t parsed;
  const char* written = nullptr;
  if (cgx_config_parse(config.c_str(), &parsed) != CGX_OK ||
      cgx_config_override(own.c_str(), &parsed) != CGX_OK ||
      cgx_config_text(&parsed, &written) != CGX_OK) {
    refuse_config(operator_name(verb));
  }
  known = given;
  known.config = config;
  if (given.compressor) known.compressor = compressor = *given.compressor;
  if (given.rounding) known.rounding = rounding = *given.rounding;
  return text = written;
}

Options::Options(std::string_view op, int64_t depth, std::string_view config, std::string_view name,
                 std::string_view group_name, std::string_view carrier, int32_t verb)
    : verb(verb), op(op), depth(depth), name(name), group_name(group_name), carrier(carrier) {
  const Parsed& known = parsed(operator_name(verb), config);
  config_text = known.text;
  this->config = known.config;
  seed_use = known.seed_use;
  exact = known.exact;
}

std::string Options::pack() const {
  std::string call;
  call.reserve(config_text->size() + name.size() + 64);
  call.append("op=")
      .append(op)
      .append(" depth=")
      .append(std::to_string(depth))
      .append(" ")
      .append(*config_text);
  return call.append(kName).append(name);
}

Options Options::unpack(std::string_view call, std::string_view group_name,
                        std::string_view carrier, int32_t verb) {
  std::string_view rest = call;
  const std::string_view op = take(call, "op=", &rest), depth = take(call, "depth=", &rest);
  int64_t number = -1;
  std::from_chars(depth.data(), depth.data() + depth.size(), number);
  const size_t name = rest.find(kName);  // the name is last and may contain anything
  if (number < 0 || name == rest.npos) refuse(call);
  return {op,      number, rest.substr(0, name), rest.substr(name + kName.size()), group_name,
          carrier, verb};
}

void Options::check(const at::Tensor& x) const {
  const char* const caller = operator_name(verb);
  check_tensor(caller, x);
  const int32_t reduction = choose(kOps, caller, "op", op);
  choose(kCarriers, caller, "carrier", carrier);
  if (carried() && (config.algorithm == CGX_RING || config.algorithm == CGX_HIERARCHICAL)) {
    C10_THROW_ERROR(ValueError, c10::str(caller, ": carrier 'c10d' has no algorithm '",
                                         config.algorithm == CGX_RING ? "ring" : "hierarchical",
                                         "'; use auto, sra or one_shot"));
  }
  if (!is_linear(reduction) && !exact) {
    C10_THROW_ERROR(ValueError,
                    c10::str(caller, ": op '", op,
                             "' of compressed values; only sum and avg can be quantized: use "
                             "bits=32 or compressor='lossless'"));
  }
}

void Options::check_native() const {
  if (!carried()) return;
  C10_THROW_ERROR(NotImplementedError,
                  c10::str(operator_name(verb),
                           ": carrier 'c10d' supports quantized_allreduce only; use "
                           "carrier='native', which supports groups of any backend"));
}

Options Options::gradient() const {
  const char* const caller = operator_name(verb);
  if (!is_linear(choose(kOps, caller, "op", op))) {
    C10_THROW_ERROR(NotImplementedError, c10::str(caller, ": op '", op,
                                                  "' has no gradient; call it on x.detach() or "
                                                  "under torch.no_grad()"));
  }
  Options options = *this;
  // Forward and backward calls have different names, so that their occurrences are counted
  // separately.
  if (!name.empty()) options.name += "/grad";
  ++options.depth;
  if (verb == CGX_REDUCE_SCATTER) {
    options.verb = CGX_ALL_GATHER;
    options.op = "sum";  // backward divides by the group's size itself
  } else if (verb == CGX_ALL_GATHER) {
    options.verb = CGX_REDUCE_SCATTER;
  }
  return options;
}

CallBuilder Options::collective() const {
  CallBuilder call(name);
  call.fields.verb = verb;
  call.fields.op = choose(kOps, operator_name(verb), "op", op);
  call.fields.config = config;
  return call;
}

// A tuple, because compiled autograd compares whole tuples, and all these values shape the graph.
c10::IValue Options::value() const {
  return std::make_tuple(pack(), group_name, carrier, int64_t{verb});
}

Options Options::of(const c10::IValue& value) {
  const std::vector<c10::IValue> e = value.toTuple()->elements().vec();
  return unpack(e[0].toStringRef(), e[1].toStringRef(), e[2].toStringRef(),
                static_cast<int32_t>(e[3].toInt()));
}

}  // namespace cgx::torch_ops
