// What codec.py runs: every operation of the codec on one core, beside memcpy of the values.
//
//   codec_bench time NUMEL ROUNDS   rounds over all operations in turn; prints for each its seconds
//                                   a call, one number a round
//   codec_bench count NUMEL         calls each once, inside run_case(): for callgrind, which counts
//                                   there alone and dumps after each
//
// quantize-residual is quantize with error feedback: adds what was lost before, keeps what is lost.
//
// A line is: dtype, operation, bits, rounding ("-": none), numbers.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "algorithm/chunks.h"
#include "algorithm/layout.h"
#include "api.h"
#include "base/float_mode.h"
#include "compressor/codec.h"
#include "kernel/kernels.h"

namespace {

struct Case {
  std::string name;
  std::function<void()> call;
};

// Values of one dtype, and room for what the operations make of them.
struct Buffers {
  Buffers(cgx::Dtype dtype, int64_t numel)
      : dtype(dtype),
        numel(numel),
        values(numel * 4),
        result(numel * 4),
        residual(numel * 4),
        sum(numel) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (float& value : sum) value = normal(generator);
    cgx::kernels().convert(cgx::Dtype::kFloat32, sum.data(), dtype, values.data(), numel);
  }
  cgx::Dtype dtype;
  int64_t numel;
  std::vector<std::byte> values, result, residual;
  std::vector<float> sum;
};

// What one_shot encodes of a rank's own values, in one chunk, with their residual.
class Feedback {
 public:
  Feedback(Buffers& b, int bits, cgx::RoundingMode rounding) : plan_(plan_of(b, bits, rounding)) {
    layout_ = std::make_unique<cgx::Layout>(plan_);
    message_.resize(layout_->longest_message());
  }
  void encode() {
    const cgx::Shard& shard = layout_->shard(0);
    for (const cgx::Chunk& chunk : shard.chunks)
      cgx::encode_chunk(plan_, shard, chunk, cgx::Way::kScatter, plan_.input, message_.data());
  }

 private:
  static cgx::Plan plan_of(Buffers& b, int bits, cgx::RoundingMode rounding) {
    const cgx_segment_t segment{0, b.numel, 512, bits, 0};
    void* residuals[] = {b.residual.data()};
    auto call = cgx::make<cgx_collective_t>();
    call.dtype = static_cast<int32_t>(b.dtype);
    call.config.algorithm = CGX_ONE_SHOT;
    call.config.rounding = static_cast<int64_t>(rounding);
    call.segments = &segment;
    call.num_segments = 1;
    call.input = b.values.data();
    call.output = b.result.data();
    call.residuals = residuals;
    cgx::Plan plan = cgx::make_plan(call, /*rank=*/0, /*size=*/2);
    plan.chunk_bytes = b.numel * 4;
    return plan;
  }
  const cgx::Plan plan_;
  std::unique_ptr<cgx::Layout> layout_;
  std::vector<std::byte> message_;
};

void add_cases(Buffers& b, const std::string& dtype, std::vector<Case>& cases) {
  cases.push_back({dtype + " memcpy 32 -", [&b] {
                     std::memcpy(b.result.data(), b.values.data(), b.numel * size_of(b.dtype));
                   }});
  for (int bits = 1; bits <= 8; ++bits) {
    const cgx::CodecSettings settings = {.dtype = b.dtype, .bits = bits};
    const std::shared_ptr<cgx::Codec> codec = cgx::make_codec(settings);
    const std::string width = std::to_string(bits);
    const auto bytes = std::make_shared<std::vector<std::byte>>(codec->max_bytes(b.numel));
    const auto encode = [=, &b](cgx::RoundingMode mode) {
      codec->encode(b.dtype, b.values.data(), b.numel, 0, {.mode = mode, .seed = 1}, bytes->data());
    };
    cases.push_back(
        {dtype + " quantize " + width + " nearest", [=] { encode(cgx::RoundingMode::kNearest); }});
    cases.push_back({dtype + " quantize " + width + " stochastic",
                     [=] { encode(cgx::RoundingMode::kStochastic); }});
    for (const bool random : {false, true}) {
      const auto feedback = std::make_shared<Feedback>(
          b, bits, random ? cgx::RoundingMode::kStochastic : cgx::RoundingMode::kNearest);
      cases.push_back(
          {dtype + " quantize-residual " + width + (random ? " stochastic" : " nearest"),
           [=] { feedback->encode(); }});
    }
    cases.push_back({dtype + " dequantize " + width + " -", [=, &b] {
                       codec->decode(*bytes, b.numel, /*first_index=*/0, b.dtype, b.result.data());
                     }});
    if (b.dtype != cgx::Dtype::kFloat32) continue;  // sums are fp32, whatever travels
    cases.push_back({dtype + " dequantize-add " + width + " -", [=, &b] {
                       codec->decode_add(*bytes, b.numel, /*first_index=*/0, b.sum.data(),
                                         b.sum.data());
                     }});
  }
}

// Small calls are timed together.
double seconds(const Case& each, int calls) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) each.call();
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  return passed.count() / calls;
}

}  // namespace

extern "C" [[gnu::noinline]] void run_case(const Case& each) { each.call(); }

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (!(mode == "time" && argc == 4) && !(mode == "count" && argc == 3)) {
    std::fprintf(stderr, "usage: codec_bench time NUMEL ROUNDS | codec_bench count NUMEL\n");
    return 2;
  }
  const cgx::FloatMode float_mode;
  const int64_t numel = std::atoll(argv[2]);
  Buffers fp32(cgx::Dtype::kFloat32, numel), bf16(cgx::Dtype::kBfloat16, numel);
  std::vector<Case> cases;
  add_cases(fp32, "fp32", cases);
  add_cases(bf16, "bf16", cases);

  std::vector<std::vector<double>> samples(cases.size());
  const int rounds = mode == "time" ? std::atoi(argv[3]) + 1 : 0;  // the first brings memory in
  const int calls = static_cast<int>(std::max<int64_t>(1, (1 << 20) / numel));
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const double passed = seconds(cases[i], calls);
      if (round > 0) samples[i].push_back(passed);
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    if (mode == "count") run_case(cases[i]);
    std::printf("%s", cases[i].name.c_str());
    for (const double sample : samples[i]) std::printf(" %.9g", sample);
    std::printf("\n");
  }
}
