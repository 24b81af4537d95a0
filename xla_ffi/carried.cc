// The XLA FFI handlers of psum_q with carrier="xla": the arithmetic between the exchanges, which
// are XLA's own collectives (cgx.h, section 5).
//
//   sra       Encode -> all-to-all -> Reduce -> all-gather -> Decode
//   one_shot  Encode -> all-gather -> Decode
//
// If a process has several devices of the group, Sum runs first and Round last. All are pure
// functions of their operands, without a communicator, and never block.
//
// Messages are rows of equal length, as XLA's collectives need them, padded with zeros to the
// longest. Row r of an all-to-all is for rank r; a rank's own row is all zeros.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cgx/cgx.h"
#include "core.h"
#include "handlers.h"

namespace cgx::xla {
namespace {

using U8Buffer = ffi::Buffer<ffi::U8>;

// ---- one call of cgx.h --------------------------------------------------------------------------

void Require(bool expected, const char* what) {
  if (expected) return;
  throw StatusError(CGX_INTERNAL, std::string("the ") + what +
                                      " of a custom call do not match this cgx_ops release");
}

// A call with its lists. A leaf is (examples, elements): each example of a vmap is a segment.
class CarriedCall {
 public:
  // `seeds`: of each segment, as ReadSeeds takes them. Results need them too: some codecs derive
  // the indices of values from them.
  CarriedCall(const ffi::Dictionary& attributes, const U32Buffer& rank, const U32Buffer& seeds)
      : configs_(attributes),
        call_(MakeCall(verb_of(CGX_ALLREDUCE), GetInt32(attributes, "op"), configs_)),
        carried_(make<cgx_carried_t>()) {
    call_.fields.divisor = GetAttribute<int64_t>(attributes, "divisor");
    call_.seeds = ReadSeeds(seeds);
    carried_.rank = static_cast<int32_t>(*rank.typed_data());
    carried_.size = GetInt32(attributes, "size");
    carried_.devices = static_cast<int32_t>(call_.fields.divisor / carried_.size);
  }
  CarriedCall(const CarriedCall&) = delete;

  // Sets this rank's values and, with feedback, residuals, each in the buffer of its operand.
  void SetInputs(const ffi::RemainingArgs& leaves, const ffi::RemainingRets& residuals) {
    for (size_t i = 0; i < configs_.size(); ++i) {
      AddLeaf(GetBuffer<ffi::AnyBuffer>(leaves, i), configs_[i], call_.inputs);
      if (residuals.size() > 0)
        AddPointers(*GetBuffer<ffi::AnyBuffer>(residuals, i), call_.residuals);
    }
    Require(residuals.size() == 0 || call_.residuals.size() == call_.inputs.size(), "residuals");
    Plan();
  }

  void SetOutputs(const ffi::RemainingRets& results) {
    for (size_t i = 0; i < configs_.size(); ++i)
      AddLeaf(*GetBuffer<ffi::AnyBuffer>(results, i), configs_[i], call_.outputs);
    Plan();
  }

  const cgx_carried_t* get() const { return &carried_; }
  int64_t rank() const { return carried_.rank; }
  int64_t size() const { return carried_.size; }
  bool one_shot() const { return algorithm_ == CGX_ONE_SHOT; }
  // Bytes that each rank receives from each other one, and that each rank sends to all.
  const std::vector<int64_t>& scatter_bytes() const { return scatter_bytes_; }
  const std::vector<int64_t>& gather_bytes() const { return gather_bytes_; }

 private:
  template <typename Pointers>
  void AddLeaf(const ffi::AnyBuffer& leaf, const cgx_config_t& config, Pointers& pointers) {
    Require(leaf.dimensions().size() == 2, "leaves");
    call_.fields.dtype = ToDtype(leaf.element_type());
    for (int64_t example = 0; example < leaf.dimensions()[0]; ++example)
      call_.add(leaf.dimensions()[1], &config, static_cast<int32_t>(example));
    AddPointers(leaf, pointers);
  }

  template <typename Pointers>
  static void AddPointers(const ffi::AnyBuffer& leaf, Pointers& pointers) {
    const int64_t bytes = leaf.dimensions()[1] * SizeOf(ToDtype(leaf.element_type()));
    for (int64_t example = 0; example < leaf.dimensions()[0]; ++example)
      pointers.push_back(static_cast<std::byte*>(leaf.untyped_data()) + example * bytes);
  }

  void Plan() {
    carried_.call = &call_.get();
    Require(static_cast<int64_t>(call_.seeds.size()) == carried_.call->num_segments, "seeds");
    scatter_bytes_.resize(size());
    gather_bytes_.resize(size());
    check(cgx_carried_plan(&carried_, &algorithm_, scatter_bytes_.data(), gather_bytes_.data()));
  }

  const LeafConfigs configs_;
  CallBuilder call_;
  cgx_carried_t carried_;
  int32_t algorithm_ = CGX_AUTO;  // resolved by the plan
  std::vector<int64_t> scatter_bytes_, gather_bytes_;
};

// ---- messages as rows ---------------------------------------------------------------------------

std::byte* Bytes(const U8Buffer& buffer) {
  return reinterpret_cast<std::byte*>(buffer.typed_data());
}

// Returns the length of each of `rows` rows in a buffer that hold these messages.
int64_t RowLength(const U8Buffer& buffer, int64_t rows, const std::vector<int64_t>& messages) {
  const auto bytes = static_cast<int64_t>(buffer.element_count());
  const int64_t longest = *std::max_element(messages.begin(), messages.end());
  Require(bytes % rows == 0 && bytes / rows >= longest, "messages");
  return bytes / rows;
}

// Moves concatenated messages to rows of `length` bytes. Starts with the last: no row begins before
// its message did.
void SpreadRows(const std::vector<int64_t>& bytes, int64_t length, std::byte* rows) {
  int64_t begin = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  for (size_t row = bytes.size(); row-- > 0;) {
    begin -= bytes[row];
    std::byte* to = rows + row * length;
    std::memmove(to, rows + begin, bytes[row]);
    std::memset(to + bytes[row], 0, length - bytes[row]);
  }
}

// Concatenates the first `bytes` of each row except the rank's own.
std::unique_ptr<std::byte[]> PackRows(const std::byte* rows, int64_t length, int64_t bytes,
                                      const CarriedCall& call) {
  auto packed = std::make_unique_for_overwrite<std::byte[]>((call.size() - 1) * bytes);
  std::byte* to = packed.get();
  for (int64_t row = 0; row < call.size(); ++row) {
    if (row == call.rank()) continue;
    std::memcpy(to, rows + row * length, bytes);
    to += bytes;
  }
  return packed;
}

// ---- the handlers' work -------------------------------------------------------------------------

// Sums (members, n) to float32 (n), in the order of the members.
void Sum(ffi::AnyBuffer values, ffi::Result<ffi::Buffer<ffi::F32>> sum) {
  const auto numel = static_cast<int64_t>(sum->element_count());
  const cgx_dtype_t dtype = ToDtype(values.element_type());
  std::vector<const void*> rows(values.dimensions().front());
  for (size_t row = 0; row < rows.size(); ++row)
    rows[row] = static_cast<std::byte*>(values.untyped_data()) + row * numel * SizeOf(dtype);
  check(cgx_sum(dtype, rows.data(), static_cast<int32_t>(rows.size()), numel, sum->typed_data()));
}

// Rounds float32 to another dtype.
void Round(ffi::Buffer<ffi::F32> values, ffi::Result<ffi::AnyBuffer> rounded) {
  check(cgx_convert(CGX_FLOAT32, values.typed_data(), ToDtype(rounded->element_type()),
                    rounded->untyped_data(), static_cast<int64_t>(values.element_count())));
}

void RoundResidual(ffi::Buffer<ffi::F32> values, ffi::Result<ffi::AnyBuffer> rounded) {
  check(cgx_convert_residual(values.typed_data(), ToDtype(rounded->element_type()),
                             rounded->untyped_data(),
                             static_cast<int64_t>(values.element_count())));
}

void Encode(ffi::Dictionary attributes, U32Buffer rank, U32Buffer seeds,
            ffi::RemainingArgs leaves_and_residuals, ffi::Result<U8Buffer> messages,
            ffi::RemainingRets residuals) {
  CarriedCall call(attributes, rank, seeds);
  call.SetInputs(leaves_and_residuals, residuals);
  std::vector<int64_t> bytes;  // per row
  if (call.one_shot()) {
    bytes = {call.gather_bytes()[call.rank()]};
  } else {
    bytes = call.scatter_bytes();
    bytes[call.rank()] = 0;
  }
  const auto rows = static_cast<int64_t>(bytes.size());
  const int64_t length = RowLength(*messages, rows, bytes);
  // All rows but the rank's own are sent, with their padding.
  const int64_t sent = call.one_shot() ? length : (rows - 1) * length;
  check(cgx_carried_encode(call.get(), messages->typed_data(), sent));
  SpreadRows(bytes, length, Bytes(*messages));
}

// Updates the residuals of Encode for the elements that this rank reduces.
void Reduce(ffi::Dictionary attributes, U32Buffer rank, U32Buffer seeds, U8Buffer arrived,
            ffi::RemainingArgs leaves_and_residuals, ffi::Result<U8Buffer> message,
            ffi::RemainingRets residuals) {
  CarriedCall call(attributes, rank, seeds);
  call.SetInputs(leaves_and_residuals, residuals);
  const int64_t arrived_length = RowLength(arrived, call.size(), call.scatter_bytes());
  const int64_t bytes = call.scatter_bytes()[call.rank()];
  const auto packed = PackRows(Bytes(arrived), arrived_length, bytes, call);
  check(cgx_carried_reduce(call.get(), packed.get(), (call.size() - 1) * bytes,
                           message->typed_data(), RowLength(*message, 1, call.gather_bytes())));
}

void Decode(ffi::Dictionary attributes, U32Buffer rank, U32Buffer seeds, U8Buffer gathered,
            ffi::RemainingRets results) {
  CarriedCall call(attributes, rank, seeds);
  call.SetOutputs(results);
  check(cgx_carried_decode(call.get(), gathered.typed_data(),
                           static_cast<int64_t>(gathered.element_count())));
}

// ---- bindings -------------------------------------------------------------------------------

// Converts a function that throws to a handler.
template <typename... Arguments>
auto Handler(void (*work)(Arguments...)) {
  return [work](Arguments... arguments) {
    try {
      work(arguments...);
      return ffi::Error::Success();
    } catch (const std::exception& error) {
      return ToError(error, "psum_q with carrier='xla': ");
    }
  };
}

// Binds the attributes, the rank and the seeds, which all steps have.
auto BindStep() { return ffi::Ffi::Bind().Attrs().Arg<U32Buffer>().Arg<U32Buffer>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarriedSum, Handler(&Sum),
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarriedRound, Handler(&Round),
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarriedRoundResidual, Handler(&RoundResidual),
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarriedEncode, Handler(&Encode),
                              BindStep().RemainingArgs().Ret<U8Buffer>().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CarriedReduce, Handler(&Reduce),
    BindStep().Arg<U8Buffer>().RemainingArgs().Ret<U8Buffer>().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CarriedDecode, Handler(&Decode),
                              BindStep().Arg<U8Buffer>().RemainingRets());

}  // namespace cgx::xla
