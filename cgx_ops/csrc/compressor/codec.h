// A codec converts values of one rank to bytes and back. It does not depend on ranks or transports;
// algorithms (algorithm/) send its bytes. An object has the settings of one segment and is
// immutable, so threads may share it.
//
// Values that begin at a multiple of cut() are encoded independently of earlier ones, so shards are
// cut there. From the shard's first value on, they can be cut into messages every grain() values.
//
// - Codec: the length depends on the values. encode() returns it, and decode() validates it. A call
//   encodes at most grain() values, which are a message of their own.
// - FixedLengthCodec: the length depends on the number of values only. A call encodes any number of
//   grains, and the bytes of a grain begin at offset(first).
//
// Sums are fp32 and are computed by the algorithm. So encode() accepts fp32 whatever the tensor's
// dtype.
//
// A new codec is a file in this folder and a row of codec_table().
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

class FixedLengthCodec;
struct CodecEntry;

class Codec {
 public:
  virtual ~Codec() = default;

  virtual int64_t grain() const = 0;
  virtual int64_t cut() const { return grain(); }
  // Segments of fewer values share messages, unless the length is fixed.
  virtual int64_t packs_below() const { return grain(); }

  // The largest size of `numel` encoded values: the sum over their grains.
  virtual int64_t max_bytes(int64_t numel) const = 0;

  // Returns the bytes written, at least 1 if numel > 0. `first_index`: the index of values[0] in
  // its segment, for the noise.
  virtual int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes) const = 0;

  // Like encode() for fp32, but also computes the quantization errors: errors = values - decoded,
  // or 0 if that is not finite. `errors` may be `values`.
  virtual int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                                 const Rounding& rounding, std::byte* bytes, float* errors) const;

  // Decode values. They throw Error(CGX_INVALID_ARGUMENT), and read nothing beyond `bytes`, if the
  // bytes are not a valid encoding of `numel` values. `first_index`: as for encode().
  virtual void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                      Dtype dtype, void* values) const = 0;
  // sum = base + decoded, in fp32. `base` may be `sum`.
  virtual void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                          const float* base, float* sum) const = 0;

  // Returns this codec if its lengths depend on the number of values only, else null.
  virtual const FixedLengthCodec* fixed_length() const { return nullptr; }
};

class FixedLengthCodec : public Codec {
 public:
  // The offset of element `first` (a multiple of grain()) in an encoding, or the size of the
  // encoding of `first` elements.
  virtual int64_t offset(int64_t first) const = 0;

  // The bytes of `numel` values from `first` on, in the encoding of a run.
  std::span<const std::byte> slice(std::span<const std::byte> bytes, int64_t first,
                                   int64_t numel) const {
    const int64_t at = offset(first);
    return bytes.subspan(at, offset(first + numel) - at);
  }

  // Throws Error(CGX_INVALID_ARGUMENT) unless `bytes` has the size of the encoding of `numel`
  // values.
  void check_length(std::span<const std::byte> bytes, int64_t numel) const;

  int64_t max_bytes(int64_t numel) const final { return offset(numel); }
  const FixedLengthCodec* fixed_length() const final { return this; }
};

// The settings of a segment's codec. Codecs with equal settings produce equal bytes.
struct CodecSettings {
  Dtype dtype = Dtype::kFloat32;  // of uncompressed values
  int bits = kExactBits;          // kExactBits: uncompressed, with any compressor
  int64_t bucket_size = 512;
  bool skip_incomplete_buckets = false;
  cgx_compressor_t compressor = CGX_UNIFORM;
  int64_t density = 0;  // this and the following as in cgx_config_t, with defaults resolved
  int value_bits = 0;
  int64_t rate = 0;
  int rotation = 0;
  bool clip = false;
  uint64_t seed = 0;  // of the random indices that all ranks share (randk)
  bool operator==(const CodecSettings&) const = default;
};

// Whether a sum is a majority vote. Then every rank's values are encoded before they are added, and
// the result is the decoded encoding of the sum.
inline bool votes(const CodecSettings& settings) {
  return settings.bits != kExactBits && settings.compressor == CGX_SIGN;
}

// A run of values with one coding, for GPU kernels.
struct DeviceRun {
  int64_t first;  // element
  int64_t numel;
  Coding coding;
};

// At most two runs, in order. Not a vector, because a call needs several for each segment.
class DeviceRuns {
 public:
  void add(const DeviceRun& run) { at_[count_++] = run; }
  size_t size() const { return count_; }
  const DeviceRun& operator[](size_t i) const { return at_[i]; }
  const DeviceRun* begin() const { return at_; }
  const DeviceRun* end() const { return at_ + count_; }

 private:
  size_t count_ = 0;
  DeviceRun at_[2] = {};
};

// The table of codecs. Config checks, make_codec() and `info` use it.
struct CodecEntry {
  const char* name;
  const char* description;
  bool fixed_length;  // makes FixedLengthCodecs
  bool (*serves)(const CodecSettings& settings);
  std::unique_ptr<Codec> (*make)(const CodecSettings& settings);
  // How GPUs encode the values, without rotation. Null: unsupported.
  Coding (*device_coding)(const CodecSettings& settings) = nullptr;
  const char* why_not = "";  // why GPUs do not support it; "" if they do
  // Accepted config values: bits from lowest to highest (0: fixed width); roundings, the default
  // first; optional fields of the config.
  int lowest_bits = 0, highest_bits = 0;
  std::vector<RoundingMode> roundings = {RoundingMode::kNearest};
  std::vector<std::string_view> knobs = {};
  // Decoded values are those that were encoded.
  bool exact = false;
  int64_t bucket_size = 0;  // of all buckets; 0: the config's
  // Nearest rounding is biased, so training needs error feedback.
  bool biased = false;
  // Returns why error feedback does not converge with these settings, or "". Null: it converges.
  std::string (*no_feedback)(const CodecSettings& settings, RoundingMode rounding) = nullptr;

  bool has_bits(int64_t bits) const { return bits >= lowest_bits && bits <= highest_bits; }
};
const std::vector<CodecEntry>& codec_table();
// Inserts a row at the front, for tests. Call it before any collective.
void add_codec(const CodecEntry& entry);

// Returns the first row that supports the settings. Throws Error(CGX_INVALID_ARGUMENT) if none
// does.
const CodecEntry& codec_entry(const CodecSettings& settings);

// Returns the row of a compressor, for properties that do not depend on the bits.
const CodecEntry& compressor_entry(int64_t compressor);

// Makes a codec, including rotation and uncompressed incomplete buckets.
std::unique_ptr<Codec> make_codec(const CodecSettings& settings);

// Throws Error(CGX_INVALID_ARGUMENT), with the reason, if error feedback does not converge in one
// of the stages.
void check_feedback(std::span<const CodecSettings> stages, RoundingMode rounding);

// Returns the runs in which a GPU encodes `numel` values, in order. Throws Error(CGX_UNSUPPORTED),
// with the reason, if GPUs do not support the codec.
DeviceRuns device_runs(const CodecSettings& settings, int64_t numel);

}  // namespace cgx
