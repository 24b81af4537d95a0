// The builder of a cgx_collective_t and of the lists that it points to, for all bindings.
#ifndef CGX_CALL_H_
#define CGX_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cgx/cgx.h"

namespace cgx {

// One call. Its segments lie end to end.
class CallBuilder {
 public:
  explicit CallBuilder(std::string name = "") : name(std::move(name)) { fields.occurrence = -1; }

  // get() fills in the fields that the members below describe.
  cgx_collective_t fields = make<cgx_collective_t>();

  std::string name;
  std::vector<int64_t> seeds;            // by segment; empty: they follow from fields.seed
  std::vector<const void*> inputs;       // by segment; empty: fields.input
  std::vector<void*> outputs;            // by segment; empty: fields.output
  std::vector<void*> residuals;          // by segment; empty: none
  std::optional<int32_t> noise_rank;     // none: the communicator's
  std::shared_ptr<const void> own_held;  // keeps the segments' own configs alive, if needed

  // Adds a segment behind the last; returns its offset. `own`: its config; null: fields.config,
  // which must be set by now. `repeats`: as in cgx_segment_t.
  int64_t add(int64_t numel, const cgx_config_t* own = nullptr, bool repeats = false) {
    const cgx_config_t& config = own ? *own : fields.config;
    if (fields.num_segments == 1) segments_.push_back(first_);
    const cgx_segment_t segment{
        end_, numel, config.bucket_size, static_cast<int32_t>(config.bits), repeats, own};
    if (fields.num_segments++ == 0)
      first_ = segment;
    else
      segments_.push_back(segment);
    end_ += numel;
    return segment.offset;
  }

  // The call as the core takes it, until this object changes, moves or ends.
  const cgx_collective_t& get() {
    fields.name = name.c_str();
    fields.segments = segments_.empty() ? &first_ : segments_.data();
    fields.seeds = list(seeds);
    fields.inputs = list(inputs);
    fields.outputs = list(outputs);
    fields.residuals = list(residuals);
    fields.noise_rank = noise_rank ? &*noise_rank : nullptr;
    return fields;
  }

 private:
  template <typename T>
  static T* list(std::vector<T>& values) {
    return values.empty() ? nullptr : values.data();
  }

  cgx_segment_t first_ = {};  // alone, it needs no allocation
  std::vector<cgx_segment_t> segments_;
  int64_t end_ = 0;
};

}  // namespace cgx

#endif  // CGX_CALL_H_
