// libcgx with an additional codec. tests/core/test_codec_row.py loads it instead of libcgx.so.
#include "pairs_codec.h"

namespace {

const bool added = [] {
  cgx::add_pairs_codec();
  return true;
}();

}  // namespace
