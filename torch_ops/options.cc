#include "options.h"

#include <array>
#include <string_view>
#include <tuple>
#include <vector>

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
constexpr std::array<Choice, 3> kRoundings = {
    {{"nearest", CGX_NEAREST}, {"stochastic", CGX_STOCHASTIC}, {"shift", CGX_SHIFT}}};
constexpr std::array<Choice, 5> kAlgorithms = {{{"auto", CGX_AUTO},
                                                {"one_shot", CGX_ONE_SHOT},
                                                {"sra", CGX_SRA},
                                                {"ring", CGX_RING},
                                                {"hierarchical", CGX_HIERARCHICAL}}};

// The value is whether torch's collectives carry it.
constexpr std::array<Choice, 2> kCarriers = {{{"native", 0}, {"c10d", 1}}};

template <size_t n>
int32_t choose(const std::array<Choice, n>& choices, const char* what, std::string_view text) {
  std::string known;
  for (const Choice& choice : choices) {
    if (choice.text == text) return choice.value;
    known += (known.empty() ? "'" : ", '") + std::string(choice.text) + "'";
  }
  C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: ", what, " '", text,
                                       "' is unknown; use one of ", known));
}

bool valid_bits(int64_t bits) { return (bits >= 1 && bits <= 8) || bits == 32; }

bool is_linear(int32_t op) { return op == CGX_SUM || op == CGX_AVG; }

void check_tensor(const at::Tensor& x) {
  if (x.layout() != at::kStrided) {
    C10_THROW_ERROR(TypeError, c10::str("cgx::quantized_allreduce: the tensor has layout ",
                                        x.layout(), "; give it dense: x.to_dense()"));
  }
  const at::ScalarType dtype = x.scalar_type();
  if (!core_dtype(dtype)) {
    const char* remedy = at::isComplexType(dtype) ? "reduce torch.view_as_real(x)"
                         : dtype == at::kDouble   ? "convert it: x.float()"
                                                  : "convert it, x.float(), if values up to 2**24 "
                                                    "are enough; else use torch.distributed";
    C10_THROW_ERROR(TypeError, c10::str("cgx::quantized_allreduce: the tensor is ", dtype,
                                        "; float32, float16 and bfloat16 are served: ", remedy));
  }
  if (!x.device().is_cpu() && !x.device().is_cuda() && !x.device().is_meta()) {
    C10_THROW_ERROR(TypeError, c10::str("cgx::quantized_allreduce: the tensor is on ", x.device(),
                                        "; the CPU and CUDA are served: use x.cpu()"));
  }
  // A dual tensor's tangent would be lost without a word.
  if (x._fw_grad(/*level=*/0).defined()) {
    C10_THROW_ERROR(NotImplementedError,
                    "cgx::quantized_allreduce: forward-mode differentiation is not supported; "
                    "use reverse mode (backward) or x.detach()");
  }
}

}  // namespace

Options::Options(int64_t bits, int64_t bucket_size, std::string_view op, std::string_view rounding,
                 std::string_view algorithm, int64_t gather_bits, int64_t intra_bits,
                 bool skip_incomplete_buckets, int64_t minimal_size, std::string_view name,
                 int64_t depth, std::string_view group_name, std::string_view carrier)
    : bits(bits),
      bucket_size(bucket_size),
      op(op),
      rounding(rounding),
      algorithm(algorithm),
      gather_bits(gather_bits),
      intra_bits(intra_bits),
      skip_incomplete_buckets(skip_incomplete_buckets),
      minimal_size(minimal_size),
      name(name),
      depth(depth),
      group_name(group_name),
      carrier(carrier) {}

void Options::check(const at::Tensor& x) const {
  check_tensor(x);
  if (!valid_bits(bits)) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: bits is ", bits,
                                         "; use 1 to 8, or 32 for an exact sum"));
  }
  if (gather_bits != 0 && !valid_bits(gather_bits)) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: gather_bits is ", gather_bits,
                                         "; use None (as bits), 1 to 8, or 32"));
  }
  if (intra_bits != 0 && !valid_bits(intra_bits)) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: intra_bits is ", intra_bits,
                                         "; use None (exact), 1 to 8, or 32"));
  }
  if (bucket_size < 1) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: bucket_size is ", bucket_size,
                                         "; it must be at least 1 (512 is a good start)"));
  }
  if (minimal_size < 0) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: minimal_size is ", minimal_size,
                                         "; it must be 0 or more"));
  }
  const int32_t reduction = choose(kOps, "op", op);
  choose(kRoundings, "rounding", rounding);
  choose(kAlgorithms, "algorithm", algorithm);
  choose(kCarriers, "carrier", carrier);
  if (carried() && (algorithm == "ring" || algorithm == "hierarchical")) {
    C10_THROW_ERROR(ValueError,
                    c10::str("cgx::quantized_allreduce: carrier 'c10d' has no algorithm '",
                             algorithm, "'; use auto, sra or one_shot"));
  }
  if (carried() && x.is_cuda()) {
    C10_THROW_ERROR(TypeError, c10::str("cgx::quantized_allreduce: the tensor is on ", x.device(),
                                        ", and what carrier 'c10d' sends is encoded on the CPU: "
                                        "use carrier='native', or x.cpu()"));
  }
  if (!is_linear(reduction) && bits != 32) {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce: op '", op, "' at ", bits,
                                         " bits; only sum and avg can be quantized: use bits=32"));
  }
}

Options Options::gradient() const {
  if (!is_linear(choose(kOps, "op", op))) {
    C10_THROW_ERROR(NotImplementedError,
                    c10::str("cgx::quantized_allreduce: op '", op,
                             "' has no gradient; call it on x.detach() or under torch.no_grad()"));
  }
  Options options = *this;
  // A name of its own: forward and backward calls count their occurrences apart.
  if (!name.empty()) options.name += "/grad";
  ++options.depth;
  return options;
}

cgx_collective_t Options::collective() const {
  auto c = make<cgx_collective_t>();
  c.verb = CGX_ALLREDUCE;
  c.op = choose(kOps, "op", op);
  c.algorithm = choose(kAlgorithms, "algorithm", algorithm);
  c.rounding = choose(kRoundings, "rounding", rounding);
  c.gather_bits = static_cast<int32_t>(gather_bits);
  c.intra_bits = static_cast<int32_t>(intra_bits);
  c.skip_incomplete_buckets = skip_incomplete_buckets ? 1 : 0;
  c.minimal_size = minimal_size;
  c.name = name.c_str();
  c.occurrence = -1;
  return c;
}

// A tuple, because compiled autograd turns loose integers into graph inputs and compares whole
// tuples: all of these shape the program.
c10::IValue Options::pack() const {
  return std::make_tuple(bits, bucket_size, op, rounding, algorithm, gather_bits, intra_bits,
                         skip_incomplete_buckets, minimal_size, name, depth, group_name, carrier);
}

Options Options::unpack(const c10::IValue& packed) {
  const std::vector<c10::IValue> e = packed.toTuple()->elements().vec();
  return {e[0].toInt(),       e[1].toInt(),       e[2].toStringRef(), e[3].toStringRef(),
          e[4].toStringRef(), e[5].toInt(),       e[6].toInt(),       e[7].toBool(),
          e[8].toInt(),       e[9].toStringRef(), e[10].toInt(),      e[11].toStringRef(),
          e[12].toStringRef()};
}

}  // namespace cgx::torch_ops
