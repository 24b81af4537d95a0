// What a caller of quantized_allreduce may say besides the tensor, and the checks of both.
//
//   1. Options: the operator's arguments after the tensor
//   2. check(): refuses what cannot work, before anything is drawn, allocated or sent; the kernels
//      and the tracing (Meta) kernels share it, so that a model fails alike compiled and not
//   3. collective(): the same as cgx.h wants it
#ifndef CGX_TORCH_OPS_OPTIONS_H_
#define CGX_TORCH_OPS_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

// The dispatcher takes plain functions, so every kernel lists these: what it is declared with, and
// what it hands on. The schemas in library.cc have them in the same order.
#define CGX_KERNEL_PARAMETERS                                                                   \
  const std::optional<at::Tensor>&seed, int64_t bits, int64_t bucket_size, std::string_view op, \
      std::string_view rounding, std::string_view algorithm, int64_t gather_bits,               \
      int64_t intra_bits, bool skip_incomplete_buckets, int64_t minimal_size,                   \
      std::string_view name, int64_t depth
#define CGX_KERNEL_OPTIONS                                                                      \
  bits, bucket_size, op, rounding, algorithm, gather_bits, intra_bits, skip_incomplete_buckets, \
      minimal_size, name, depth
// Likewise for the public operators.
#define CGX_PUBLIC_PARAMETERS                                                                    \
  int64_t bits, int64_t bucket_size, std::string_view op, std::string_view group_name,           \
      std::string_view rounding, std::string_view algorithm, std::optional<int64_t> gather_bits, \
      std::optional<int64_t> intra_bits, bool skip_incomplete_buckets, int64_t minimal_size,     \
      std::string_view name, std::string_view carrier

struct Options {
  Options(int64_t bits, int64_t bucket_size, std::string_view op, std::string_view rounding,
          std::string_view algorithm, int64_t gather_bits, int64_t intra_bits,
          bool skip_incomplete_buckets, int64_t minimal_size, std::string_view name, int64_t depth,
          std::string_view group_name, std::string_view carrier = "native");

  int64_t bits;
  int64_t bucket_size;
  std::string op;
  std::string rounding;
  std::string algorithm;
  int64_t gather_bits;
  int64_t intra_bits;
  bool skip_incomplete_buckets;
  int64_t minimal_size;
  std::string name;
  int64_t depth;  // 0: a forward call, n: the gradient of one of depth n - 1
  std::string group_name;
  std::string carrier;

  // Throws ValueError (options) or TypeError (tensor), naming the remedy.
  void check(const at::Tensor& x) const;

  // Whether rounding needs a random seed.
  bool random() const { return rounding != "nearest" && bits < 32; }
  // Whether torch's own collectives move the bytes.
  bool carried() const { return carrier == "c10d"; }

  // What the gradient of a call with these options is called with. Throws NotImplementedError for
  // an op without one.
  Options gradient() const;

  // Every field but comm, seed, buffers and segments. Points into this object.
  cgx_collective_t collective() const;

  // One value that autograd can keep and compare.
  c10::IValue pack() const;
  static Options unpack(const c10::IValue& packed);
};

}  // namespace cgx::torch_ops

#endif  // CGX_TORCH_OPS_OPTIONS_H_
