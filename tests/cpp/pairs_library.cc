// libcgx with a codec more: what tests/core/test_codec_row.py puts in the place of libcgx.so.
#include "pairs_codec.h"

namespace {

const bool added = [] {
  cgx::add_pairs_codec();
  return true;
}();

}  // namespace
