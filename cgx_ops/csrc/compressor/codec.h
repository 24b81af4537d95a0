// A codec maps the values of one rank to bytes and back. It knows no rank and no transport; routes
// (algorithm/) move its bytes. One object serves one segment's settings and is immutable, so
// threads may share it.
//
//   Codec         an encoding is one whole, of a length that encode() returns. That length travels
//                 with the message; decode() checks it. Only one_shot serves it: it cuts nothing
//   SlicedCodec   the length is known beforehand, and a run of values that begins at a multiple of
//                 grain() encodes independently of the rest: its bytes begin at offset(first). So
//                 shards and chunks are cut there, and every route serves it
//
// Sums are fp32 and belong to the route: encode() accepts fp32 whatever the tensor's dtype is.
//
// A new codec is a file beside this one and a row of codec_table().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernel/bucket_format.h"

namespace cgx {

class SlicedCodec;
struct CodecEntry;

class Codec {
 public:
  virtual ~Codec() = default;

  // Of an encoding of so many values, at most.
  virtual int64_t max_bytes(int64_t numel) const = 0;

  // Returns the bytes written. first_index: of values[0] in its segment, for the noise.
  virtual int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes) const = 0;

  // encode() of fp32 that keeps what is lost: values - decoded, or 0 where that is not finite.
  // `lost` may be `values`.
  virtual int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                                 const Rounding& rounding, std::byte* bytes, float* lost) const;

  // These throw Error(CGX_INVALID_ARGUMENT), and read nothing beyond `bytes`, where those are no
  // encoding of so many values. first_index: as it was given to encode().
  virtual void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                      Dtype dtype, void* values) const = 0;
  // sum = base + decoded, in fp32; `base` may be `sum`.
  virtual void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                          const float* base, float* sum) const = 0;

  // This codec, if it can be cut; else null.
  virtual const SlicedCodec* sliced() const { return nullptr; }
};

class SlicedCodec : public Codec {
 public:
  virtual int64_t grain() const = 0;

  // Where the bytes of element `first` of a run begin, if that is a multiple of grain(); of any
  // number of elements, where their encoding ends.
  virtual int64_t offset(int64_t first) const = 0;

  // The bytes of `numel` values from `first` on, of the encoding of a run.
  std::span<const std::byte> slice(std::span<const std::byte> bytes, int64_t first,
                                   int64_t numel) const {
    const int64_t at = offset(first);
    return bytes.subspan(at, offset(first + numel) - at);
  }

  // Throws Error(CGX_INVALID_ARGUMENT) unless the bytes are as many as an encoding has.
  void check_length(std::span<const std::byte> bytes, int64_t numel) const;

  int64_t max_bytes(int64_t numel) const final { return offset(numel); }
  const SlicedCodec* sliced() const final { return this; }
};

// Settings of one segment on the wire. Two with equal settings encode alike.
struct CodecSettings {
  Dtype dtype = Dtype::kFloat32;  // in which exact values travel
  int bits = kExactBits;          // of compressors that have bits; kExactBits: none, whichever
  int64_t bucket_size = 512;
  bool skip_incomplete_buckets = false;
  cgx_compressor_t compressor = CGX_UNIFORM;
  int64_t density = 0;  // these as in cgx_config_t, but that 0 is resolved where there is a default
  int value_bits = 0;
  int rotation = 0;
  bool clip = false;
  uint64_t seed = 0;  // of places that all ranks draw alike (randk)
  bool operator==(const CodecSettings&) const = default;
};

// Whether a sum is a majority vote: of what every rank's values decode to, and itself what it
// decodes to. Else a rank's own values need not be encoded to be added.
inline bool votes(const CodecSettings& settings) {
  return settings.bits != kExactBits && settings.compressor == CGX_SIGN;
}

// What the kernels of devices encode alike.
struct DeviceRun {
  int64_t first;  // element
  int64_t numel;
  Coding coding;
};

// The table of codecs: docs, `info`, the checks of a config and make_codec() read it.
struct CodecEntry {
  const char* name;
  const char* description;
  bool sliced;  // makes SlicedCodecs
  bool (*serves)(const CodecSettings& settings);
  std::unique_ptr<Codec> (*make)(const CodecSettings& settings);
  // How a device encodes values, but for rotation. Null: it cannot.
  Coding (*device_coding)(const CodecSettings& settings) = nullptr;
  const char* why_not = "";  // "" if a device can
  // What a config may say: bits from .. to (0: the codec has a width of its own); roundings, its
  // own first; fields of the config that not all compressors have.
  int lowest_bits = 0, highest_bits = 0;
  std::vector<RoundingMode> roundings = {RoundingMode::kNearest};
  std::vector<std::string_view> knobs = {};
  // With nearest rounding its expectation is not the value, and training needs error feedback.
  bool biased = false;
  // Why error feedback would not converge, with these settings; null, or "": it does.
  std::string (*no_feedback)(const CodecSettings& settings) = nullptr;

  bool has_bits(int64_t bits) const { return bits >= lowest_bits && bits <= highest_bits; }
};
const std::vector<CodecEntry>& codec_table();
// Puts a row before the others, for tests. Before any collective is made.
void add_codec(const CodecEntry& entry);

// The first row that serves the settings. Throws Error(CGX_INVALID_ARGUMENT) if none does.
const CodecEntry& codec_entry(const CodecSettings& settings);

// The row of a compressor by its number, for what does not depend on the bits.
const CodecEntry& compressor_entry(int64_t compressor);

// With what is around it: rotation, incomplete buckets that travel exact.
std::unique_ptr<Codec> make_codec(const CodecSettings& settings);

// Throws Error(CGX_INVALID_ARGUMENT), which says why, if error feedback would not converge in one
// of the ways that values travel.
void check_feedback(std::span<const CodecSettings> ways);

// The runs, in order, as which a device encodes `numel` values. Throws Error(CGX_UNSUPPORTED),
// which says why, if devices lack the codec.
std::vector<DeviceRun> device_runs(const CodecSettings& settings, int64_t numel);

}  // namespace cgx
