// CallBuilder: builds a cgx_collective_t and the lists that it points to. All bindings use it.
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

// The arguments of one collective, whose segments are contiguous.
//
// Set the public members and call add() for each segment, then pass get() to cgx_start, cgx_run or
// cgx_enqueue. Not thread-safe.
class CallBuilder {
 public:
  explicit CallBuilder(std::string name = "") : name(std::move(name)) { fields.occurrence = -1; }

  // All other arguments. get() sets the fields that the members below replace.
  cgx_collective_t fields = make<cgx_collective_t>();

  std::string name;
  std::vector<int64_t> seeds;            // per segment; empty: derived from fields.seed
  std::vector<const void*> inputs;       // per segment; empty: use fields.input
  std::vector<void*> outputs;            // per segment; empty: use fields.output
  std::vector<void*> residuals;          // per segment; empty: none
  std::optional<int32_t> noise_rank;     // unset: the communicator's
  std::optional<int32_t> peer;           // unset: all ranks take part
  std::shared_ptr<const void> own_held;  // owns the configs passed to add(), if needed

  // Appends a segment of `numel` elements and returns its offset. `own` is its config, which must
  // outlive this object; null: fields.config, which must be set before this call. `example`: see
  // cgx_segment_t.
  int64_t add(int64_t numel, const cgx_config_t* own = nullptr, int32_t example = 0) {
    const cgx_config_t& config = own ? *own : fields.config;
    if (fields.num_segments == 1) segments_.push_back(first_);
    const cgx_segment_t segment{
        end_, numel, config.bucket_size, static_cast<int32_t>(config.bits), example, own};
    if (fields.num_segments++ == 0)
      first_ = segment;
    else
      segments_.push_back(segment);
    end_ += numel;
    return segment.offset;
  }

  // Returns the arguments for the C API. Valid until this object is modified, moved or destroyed.
  const cgx_collective_t& get() {
    fields.name = name.c_str();
    fields.segments = segments_.empty() ? &first_ : segments_.data();
    fields.seeds = list(seeds);
    fields.inputs = list(inputs);
    fields.outputs = list(outputs);
    fields.residuals = list(residuals);
    fields.noise_rank = noise_rank ? &*noise_rank : nullptr;
    fields.peer = peer ? &*peer : nullptr;
    return fields;
  }

 private:
  template <typename T>
  static T* list(std::vector<T>& values) {
    return values.empty() ? nullptr : values.data();
  }

  cgx_segment_t first_ = {};  // saves an allocation for calls of one segment
  std::vector<cgx_segment_t> segments_;
  int64_t end_ = 0;
};

}  // namespace cgx

#endif  // CGX_CALL_H_
