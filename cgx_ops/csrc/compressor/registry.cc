// The table of compressors and the choice from it.
#include "base/status.h"
#include "compressor/compressor.h"
#include "compressor/none.h"
#include "compressor/uniform.h"

namespace cgx {

const std::vector<CompressorEntry>& compressor_table() {
  static const std::vector<CompressorEntry> table = {
      {"none", "exact values (32 bits)",
       [](const CompressorSettings& settings) { return settings.bits == kExactBits; }, make_none},
      {"uniform", "1-8 bits: levels between each bucket's minimum and maximum",
       [](const CompressorSettings& settings) { return settings.bits >= 1 && settings.bits <= 8; },
       make_uniform},
  };
  return table;
}

std::unique_ptr<Compressor> make_compressor(const CompressorSettings& settings) {
  require(settings.bucket_size >= 1, CGX_INVALID_ARGUMENT, "bucket_size=", settings.bucket_size,
          ": give at least 1");
  for (const CompressorEntry& entry : compressor_table()) {
    if (entry.serves(settings)) return entry.make(settings);
  }
  fail(CGX_INVALID_ARGUMENT, "bits=", settings.bits, ": give 1 to 8, or 32 for exact values");
}

}  // namespace cgx
