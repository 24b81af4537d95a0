#include "device/codec.h"

namespace cgx::device {
namespace {

std::byte* bytes_at(const void* address) {
  return static_cast<std::byte*>(const_cast<void*>(address));
}

// Makes a launch of all runs. place(&piece, values_at, message_at) sets the addresses of a piece.
template <typename Launch, typename Place>
Launch launch_of(const Run& run, const Place& place) {
  const CodecSettings& settings = run.settings;
  const auto runs = device_runs(settings, run.numel);
  const auto codec = make_codec(settings);
  Launch launch{};
  launch.dtype = settings.dtype;
  for (const auto& [first, numel, coding] : runs) {
    Piece piece{};
    piece.numel = numel;
    piece.first_index = run.first_index + first;
    piece.bucket_size = settings.bucket_size;
    piece.seed = run.rounding.seed;
    piece.coding = piece.reduced_coding = coding;
    place(&piece, first * size_of(settings.dtype), codec->fixed_length()->offset(first));
    launch.pieces.at[launch.pieces.count++] = piece;
  }
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
  launch.residual_scale = 1.0f;
  if (launch.pieces.count > 0) queue.reduce(launch);
}

}  // namespace cgx::device
