// A compressor maps values to bytes and back. It knows no rank and no transport; algorithms move
// its bytes. One object serves one segment's settings and is immutable, so threads may share it.
//
// What algorithms rely on:
//   - a piece of a segment that begins at a multiple of grain() encodes independently of the rest,
//     so shards and chunks are cut there;
//   - if fixed_size(), encode() fills exactly max_bytes(numel) bytes: receivers know every length.
//     Otherwise (top-k) it returns the length, which travels with the message, and such payloads
//     are gathered, not scattered.
// Sums are fp32 and belong to the algorithm: encode() accepts fp32 whatever the wire's value type
// is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/types.h"

namespace cgx {

class Compressor {
 public:
  virtual ~Compressor() = default;
  virtual bool fixed_size() const { return true; }
  virtual int64_t grain() const = 0;
  virtual int64_t max_bytes(int64_t numel) const = 0;
  // first_index: of values[0] in its segment, a multiple of grain(). Returns the bytes written.
  virtual int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes) const = 0;
  virtual void decode(const std::byte* bytes, int64_t num_bytes, int64_t numel, Dtype dtype,
                      void* values) const = 0;
  // sum = base + decoded, in fp32; `base` may be `sum`.
  virtual void decode_add(const std::byte* bytes, int64_t num_bytes, int64_t numel,
                          const float* base, float* sum) const = 0;
};

// Settings of one segment on the wire. Two with equal settings encode alike.
struct CompressorSettings {
  Dtype dtype = Dtype::kFloat32;  // in which exact values travel
  int bits = kExactBits;          // 1-8: uniform; 32: none
  int64_t bucket_size = 512;
  bool skip_incomplete_buckets = false;
  bool operator==(const CompressorSettings&) const = default;
};

// Of a piece of `numel` values: those that are not the raw ones of a last bucket that is skipped.
inline int64_t numel_of_whole_buckets(const CompressorSettings& settings, int64_t numel) {
  const bool skips = settings.skip_incomplete_buckets && settings.bits != kExactBits;
  return skips ? numel - numel % settings.bucket_size : numel;
}

// The table of compressors: docs, `info` and make_compressor() read it.
struct CompressorEntry {
  const char* name;
  const char* description;
  bool (*serves)(const CompressorSettings& settings);
  std::unique_ptr<Compressor> (*make)(const CompressorSettings& settings);
};
const std::vector<CompressorEntry>& compressor_table();

// The first entry that serves the settings. Throws Error(CGX_INVALID_ARGUMENT) if none does.
std::unique_ptr<Compressor> make_compressor(const CompressorSettings& settings);

}  // namespace cgx
