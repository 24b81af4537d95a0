#include "device/codec.h"

namespace cgx::device {
namespace {

std::byte* bytes_at(const void* address) {
  return static_cast<std::byte*>(const_cast<void*>(address));
}

// A launch of the whole buckets and, with skip_incomplete_buckets, of the raw values of the last
// one. place(&piece, values_at, message_at) says where its bytes are.
template <typename Launch, typename Place>
Launch launch_of(const Run& run, const Place& place) {
  const CompressorSettings& settings = run.settings;
  const auto compressor = make_compressor(settings);
  const int64_t whole = numel_of_whole_buckets(settings, run.numel);
  Launch launch{};
  launch.dtype = settings.dtype;
  const auto part = [&](int64_t first, int64_t numel, int bits) {
    if (numel == 0) return;
    Piece piece{};
    piece.numel = numel;
    piece.first_index = run.first_index + first;
    piece.bucket_size = settings.bucket_size;
    piece.seed = run.rounding.seed;
    piece.bits = piece.reduced_bits = bits;
    place(&piece, first * size_of(settings.dtype), compressor->max_bytes(first));
    launch.pieces.at[launch.pieces.count++] = piece;
  };
  part(0, whole, settings.bits);
  part(whole, run.numel - whole, kExactBits);
  return launch;
}

template <typename Launch>
void round_as(const Rounding& rounding, Launch* launch) {
  launch->rounding = rounding.mode;
  launch->rank = rounding.rank;
  launch->phase = rounding.phase;
}

}  // namespace

void quantize(Queue& queue, const Run& run, const void* values, void* message) {
  auto launch = launch_of<Encode>(run, [&](Piece* piece, int64_t values_at, int64_t message_at) {
    piece->values = bytes_at(values) + values_at;
    piece->message = bytes_at(message) + message_at;
  });
  round_as(run.rounding, &launch);
  if (launch.pieces.count > 0) queue.encode(launch);
}

void dequantize(Queue& queue, const Run& run, const void* message, void* values) {
  const auto launch = launch_of<Decode>(run, [&](Piece* piece, int64_t values_at, int64_t at) {
    piece->message = bytes_at(message) + at;
    piece->result = bytes_at(values) + values_at;
  });
  if (launch.pieces.count > 0) queue.decode(launch);
}

void sum_encoded(Queue& queue, const Run& run, const void* messages, int32_t count, int64_t stride,
                 void* message) {
  auto launch = launch_of<Reduce>(run, [&](Piece* piece, int64_t /*values_at*/, int64_t at) {
    piece->message = bytes_at(messages) + at;
    piece->reduced = bytes_at(message) + at;
  });
  round_as(run.rounding, &launch);
  launch.op = Op::kSum;
  launch.size = count;
  launch.own = -1;
  launch.stride = stride;
  launch.error_scale = 1.0f;
  if (launch.pieces.count > 0) queue.reduce(launch);
}

}  // namespace cgx::device
