// MXFP8 and MXFP4 (kernel/mx.h): blocks of 32 values, without a header of the bucket.
#pragma once

#include "kernel/cpu/blocks-inl.h"
#include "kernel/mx.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <BucketFormat kFormat>
struct Mx : BlockFormat<kFormat> {
  struct Header {};

  template <typename Value>
  static Header scan(const Stored<typename Value::Bits>* /*values*/, int64_t /*n*/) {
    return {};
  }
  [[gnu::always_inline]] static void write(const Header& /*header*/, std::byte* /*record*/) {}
  [[gnu::always_inline]] static Header read(const std::byte* /*record*/) { return {}; }

  [[gnu::always_inline]] static BlockScale scale(const Header& /*header*/, float largest) {
    return mx::scale_of_block(largest, element_of(kFormat));
  }
  [[gnu::always_inline]] static float scale_of_byte(const Header& /*header*/, uint32_t byte) {
    return mx::scale_of_byte(byte);
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
