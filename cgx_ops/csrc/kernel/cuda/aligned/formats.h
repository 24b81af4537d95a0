// The formats of codes, as template arguments. A format has these members:
//
//   kFormat, kBits, kHeaderBytes    Its name, the bits of a code, and the bytes of a header.
//   kMemoryBytes<kNoisy>            Shared memory of a group for encode().
//   load_header(), store_header()
//   decode(group, scratch, records, values)
//   encode<kNoisy, kDecodes, kChunk>(group, memory, tiling, values, noise, first_value, records,
//                                    decoded)
#pragma once

#include "kernel/cuda/aligned/pieces.h"
#include "kernel/cuda/aligned/uniform.h"
#include "kernel/cuda/with.h"

namespace cgx::device::cuda::aligned {

// Returns use(Format{}, Number<lanes>{}) for a kernel's format, and for the lanes of a bucket if it
// has the default size; otherwise 0.
template <typename Use>
auto with_format(const Variant& variant, const Use& use) {
  const auto with_lanes = [&](auto format) {
    return variant.default_size ? use(format, Number<kWarpLanes>{}) : use(format, Number<0>{});
  };
  if (variant.bits == 2) return with_lanes(Uniform<2>{});
  if (variant.bits == 4) return with_lanes(Uniform<4>{});
  return with_lanes(Uniform<8>{});
}

}  // namespace cgx::device::cuda::aligned
