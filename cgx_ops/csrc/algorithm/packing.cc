#include "algorithm/packing.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "base/hash.h"

namespace cgx {
namespace {

// Whether a segment is small for one of its codecs, which has no fixed length.
bool is_small(const Segment& segment) {
  return segment.numel > 0 &&
         std::any_of(segment.codecs.each.begin(), segment.codecs.each.end(), [&](const auto& each) {
           return !codec_entry(each).fixed_length &&
                  segment.numel < make_codec(each)->packs_below();
         });
}

// Except for bucket_size, which is at most the number of values, because codecs without a fixed
// length have no buckets.
bool same_settings(const Segment& a, const Segment& b) {
  const auto same = [](CodecSettings left, const CodecSettings& right) {
    left.bucket_size = right.bucket_size;
    return left == right;
  };
  return std::equal(a.codecs.each.begin(), a.codecs.each.end(), b.codecs.each.begin(), same) &&
         a.rounding == b.rounding && !a.residual == !b.residual;
}

class PackedAlgorithm final : public Algorithm {
 public:
  PackedAlgorithm(const Plan& plan, std::unique_ptr<Algorithm> inner)
      : plan_(plan), inner_(std::move(inner)) {}

  Bytes eager() override {
    plan_.packing->load(plan_);
    return inner_->eager();
  }
  void deliver_eager(int source, Bytes payload) override {
    inner_->deliver_eager(source, std::move(payload));
  }
  std::string disagreement() const override { return inner_->disagreement(); }
  void deliver(int part, Arrival arrival) override { inner_->deliver(part, std::move(arrival)); }
  Step step(Port& port) override {
    if (stored_) return Step::kIdle;
    if (!inner_->finished()) return inner_->step(port);
    plan_.packing->store_residuals(plan_);
    plan_.packing->store_results(plan_);
    stored_ = true;
    return Step::kWorked;
  }
  bool finished() const override { return stored_; }
  bool waits_for(int rank) const override { return inner_->waits_for(rank); }
  const char* phase() const override { return inner_->phase(); }

 private:
  const Plan plan_;
  const std::unique_ptr<Algorithm> inner_;
  bool stored_ = false;
};

}  // namespace

void Packing::pack(Plan* plan) {
  if (plan->size == 1 || std::none_of(plan->segments.begin(), plan->segments.end(), is_small))
    return;
  std::vector<std::vector<Segment>> groups;
  std::map<int32_t, std::vector<size_t>> of_example;  // numbers of groups of small segments
  uint64_t hash = fnv1a({});
  for (const Segment& segment : plan->segments) {
    const bool small = is_small(segment);
    auto& known = of_example[segment.example];
    const auto fits = [&](size_t number) {
      return small && same_settings(groups[number][0], segment);
    };
    const auto group = std::find_if(known.begin(), known.end(), fits);
    const size_t number = group == known.end() ? groups.size() : *group;
    hash = fnv1a(std::as_bytes(std::span(&number, 1)), hash);
    if (group == known.end()) {
      if (small) known.push_back(number);
      groups.push_back({segment});
    } else {
      groups[number].push_back(segment);
    }
  }
  if (groups.size() == plan->segments.size()) return;
  plan->packing_hash = hash;
  auto packing = std::make_shared<Packing>();
  plan->segments.clear();
  for (std::vector<Segment>& group : groups) {
    plan->segments.push_back(group[0]);
    if (group.size() == 1) continue;
    Segment& whole = plan->segments.back();
    whole.numel = numel_of(group);
    whole.block_bytes = plan->bytes(whole.numel);
    auto packed = std::make_unique<Packed>();
    packed->values.resize(whole.block_bytes * (plan->verb->blocks_in ? plan->size : 1));
    packed->results.resize(whole.block_bytes * (plan->verb->blocks_out ? plan->size : 1));
    if (whole.residual) packed->residuals.resize(packed->values.size());
    packed->segments = std::move(group);
    whole.input_at = distance(plan->input, packed->values.data());
    whole.output_at = distance(plan->output, packed->results.data());
    whole.residual = whole.residual ? packed->residuals.data() : nullptr;
    packing->packed_.push_back(std::move(packed));
  }
  if (plan->verb->exchanges()) plan->sends = plan->receives = plan->equal_blocks();
  plan->packing = std::move(packing);
}

template <typename Copy>
void Packing::for_segments(const Plan& plan, bool blocks, const Copy& copy) const {
  for (const auto& packed : packed_) {
    const int64_t stride = plan.bytes(numel_of(packed->segments));
    int64_t at = 0;
    for (const Segment& segment : packed->segments) {
      const int64_t bytes = plan.bytes(segment.numel);
      for (int block = 0; block < (blocks ? plan.size : 1); ++block)
        copy(*packed, at + block * stride, segment, block * segment.block_bytes, bytes);
      at += bytes;
    }
  }
}

void Packing::load(const Plan& plan) const {
  for_segments(
      plan, plan.verb->blocks_in,
      [&](Packed& packed, int64_t to, const Segment& segment, int64_t from, int64_t bytes) {
        std::memcpy(&packed.values[to], plan.input + segment.input_at + from, bytes);
        if (segment.residual) std::memcpy(&packed.residuals[to], segment.residual + from, bytes);
      });
}

void Packing::store_residuals(const Plan& plan) const {
  for_segments(plan, plan.verb->blocks_in,
               [](Packed& packed, int64_t from, const Segment& segment, int64_t to, int64_t bytes) {
                 if (segment.residual)
                   std::memcpy(segment.residual + to, &packed.residuals[from], bytes);
               });
}

void Packing::store_results(const Plan& plan) const {
  for_segments(
      plan, plan.verb->blocks_out,
      [&](Packed& packed, int64_t from, const Segment& segment, int64_t to, int64_t bytes) {
        std::memcpy(plan.output + segment.output_at + to, &packed.results[from], bytes);
      });
}

std::unique_ptr<Algorithm> make_packed(const Plan& plan, std::unique_ptr<Algorithm> inner) {
  return std::make_unique<PackedAlgorithm>(plan, std::move(inner));
}

}  // namespace cgx
