// The formats of codes, as template arguments. A format has these members:
//
//   kFormat, kBits, kHeaderBytes    Its name, the bits of a code, and the bytes of a header.
//   kAlignment                      Of its records.
//   kRoundsNoisily                  Whether it supports stochastic rounding.
//   kKeepsWriteChunks               Whether the chunks of values are always those for writing.
//   kMemoryBytes<kNoisy>            Shared memory of a group for encode().
//   load_header(), store_header()
//   decode(group, scratch, records, values)
//   encode<kNoisy, kDecodes, kChunk>(group, memory, tiling, values, noise, first_value, records,
//                                    decoded)
#pragma once

#include "kernel/cuda/aligned/levels.h"
#include "kernel/cuda/aligned/pieces.h"
#include "kernel/cuda/aligned/uniform.h"
#include "kernel/cuda/with.h"

namespace cgx::device::cuda::aligned {

// Returns use(Format{}, Number<lanes>{}) for a kernel's format, and for the lanes of a bucket if it
// has the default size; otherwise 0.
template <typename Use>
auto with_format(const Variant& variant, const Use& use) {
  using Default = Number<kWarpLanes>;
  if (variant.format == BucketFormat::kLevels) {
    if (variant.bits == 2) return use(Levels<2>{}, Default{});
    if (variant.bits == 3) return use(Levels<3>{}, Default{});
    return use(Levels<4>{}, Default{});
  }
  const auto with_lanes = [&](auto format) {
    return variant.default_size ? use(format, Default{}) : use(format, Number<0>{});
  };
  if (variant.bits == 2) return with_lanes(Uniform<2>{});
  if (variant.bits == 4) return with_lanes(Uniform<4>{});
  return with_lanes(Uniform<8>{});
}

// Returns use(std::true_type{}) or use(std::false_type{}): whether a format rounds stochastically.
template <typename Format, typename Use>
auto with_noise(bool noisy, const Use& use) {
  if constexpr (Format::kRoundsNoisily)
    return with_flag(noisy, use);
  else
    return use(std::false_type{});
}

// ---- The template arguments of the kernels of a variant ----

// Returns use(Format{}, lanes, noisy, residual).
template <typename Use>
auto with_encode(const Variant& variant, bool noisy, const Use& use) {
  return with_format(variant, [&]<typename Format>(Format format, auto lanes) {
    return with_noise<Format>(noisy, [&](auto is_noisy) {
      return with_flag(variant.residual,
                       [&](auto residual) { return use(format, lanes, is_noisy, residual); });
    });
  });
}

// A Reduce to values. Returns use(Format{}, lanes, noisy, own, residual, encodes).
template <typename Use>
auto with_values(const Variant& variant, const Use& use) {
  constexpr std::false_type kNo;
  return with_format(variant, [&](auto format, auto lanes) {
    return with_flag(variant.own, [&](auto own) { return use(format, lanes, kNo, own, kNo, kNo); });
  });
}

// A Reduce to records. The same.
template <typename Use>
auto with_records(const Variant& variant, bool noisy, const Use& use) {
  constexpr std::false_type kNo;
  constexpr std::true_type kYes;
  return with_format(variant, [&]<typename Format>(Format format, auto lanes) {
    return with_noise<Format>(noisy, [&](auto is_noisy) {
      if (!variant.own) return use(format, lanes, is_noisy, kNo, kNo, kYes);
      return with_flag(variant.residual, [&](auto residual) {
        return use(format, lanes, is_noisy, kYes, residual, kYes);
      });
    });
  });
}

}  // namespace cgx::device::cuda::aligned
