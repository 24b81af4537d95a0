// NVFP4 (kernel/nvfp4.h): blocks of 16 values, and the bucket's scale.
#pragma once

#include "kernel/cpu/blocks-inl.h"
#include "kernel/nvfp4.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Nvfp4 : BlockFormat<BucketFormat::kNvfp4> {
  using Header = nvfp4::Header;

  template <typename Value>
  static Header scan(const Stored<typename Value::Bits>* __restrict values, int64_t n) {
    return nvfp4::header_of_bucket(largest_magnitude<Value>(values, n));
  }
  [[gnu::always_inline]] static void write(const Header& header, std::byte* record) {
    __builtin_memcpy(record, &header.scale, sizeof(header.scale));
  }
  [[gnu::always_inline]] static Header read(const std::byte* record) {
    float scale;
    __builtin_memcpy(&scale, record, sizeof(scale));
    return nvfp4::header_of_scale(scale);
  }

  [[gnu::always_inline]] static BlockScale scale(const Header& header, float largest) {
    return nvfp4::scale_of_block(header, largest);
  }
  [[gnu::always_inline]] static float scale_of_byte(const Header& header, uint32_t byte) {
    return nvfp4::scale_of_byte(header, byte);
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
