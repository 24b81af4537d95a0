// The table of codecs and the choice from it.
#include "base/status.h"
#include "compressor/codec.h"
#include "compressor/none.h"
#include "compressor/uniform.h"

namespace cgx {
namespace {

std::vector<CodecEntry>& table() {
  static std::vector<CodecEntry> table = {
      {"none", "exact values (32 bits)", /*sliced=*/true,
       [](const CodecSettings& settings) { return settings.bits == kExactBits; }, make_none,
       none_runs, ""},
      {"uniform", "1-8 bits: levels between each bucket's minimum and maximum",
       /*sliced=*/true,
       [](const CodecSettings& settings) { return settings.bits >= 1 && settings.bits <= 8; },
       make_uniform, uniform_runs, ""},
  };
  return table;
}

}  // namespace

const std::vector<CodecEntry>& codec_table() { return table(); }

void add_codec(const CodecEntry& entry) { table().insert(table().begin(), entry); }

const CodecEntry& codec_entry(const CodecSettings& settings) {
  require(settings.bucket_size >= 1, CGX_INVALID_ARGUMENT, "bucket_size=", settings.bucket_size,
          ": give at least 1");
  for (const CodecEntry& entry : codec_table())
    if (entry.serves(settings)) return entry;
  fail(CGX_INVALID_ARGUMENT, "bits=", settings.bits, ": give 1 to 8, or 32 for exact values");
}

std::vector<DeviceRun> device_runs(const CodecSettings& settings, int64_t numel) {
  const CodecEntry& entry = codec_entry(settings);
  require(entry.device_runs, CGX_UNSUPPORTED, "the codec ", entry.name,
          " is not there for devices: ", entry.why_not);
  return numel > 0 ? entry.device_runs(settings, numel) : std::vector<DeviceRun>();
}

}  // namespace cgx
