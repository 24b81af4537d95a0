// Measures every codec operation on one core, and memcpy of the same values. codec.py runs it.
//
//   codec_bench time NUMEL ROUNDS [COMPRESSOR ...]
//   codec_bench count NUMEL
//
// The first prints, for each operation of all or some compressors, its seconds per call in every
// round. The second calls each operation once in run_case(), where callgrind counts instructions.
//
// rans-encode and rans-decode are the entropy coder on as many symbols, without a codec.
// quantize-residual is quantize with error feedback: it adds the old residual and writes the new
// one.
//
// An output line has: dtype, operation, compressor and options, bits, rounding ("-": none),
// numbers.
#include <algorithm>
#include <chrono>
#include <cmath>
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
#include "api/api.h"
#include "base/float_mode.h"
#include "compressor/codec.h"
#include "compressor/frequencies.h"
#include "compressor/wrappers.h"
#include "config.h"
#include "config_codec.h"
#include "kernel/kernels.h"

namespace {

struct Case {
  std::string name;
  std::function<void()> call;
};

// Values of one dtype, and buffers for the results of the operations.
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

// The encoding of one_shot: one chunk of a rank's values, with their residual.
class Feedback {
 public:
  Feedback(Buffers& b, const cgx_config_t& config) : plan_(plan_of(b, config)) {
    layout_ = std::make_unique<cgx::Layout>(plan_);
    message_.resize(layout_->longest_message());
  }
  void encode() {
    const cgx::Shard& shard = layout_->shard(0);
    for (const cgx::Chunk& chunk : shard.chunks)
      cgx::encode_chunk(plan_, shard, chunk, cgx::Stage::kScatter, plan_.input, message_.data());
  }

 private:
  static cgx::Plan plan_of(Buffers& b, const cgx_config_t& config) {
    const cgx_segment_t segment{0, b.numel, config.bucket_size, static_cast<int32_t>(config.bits),
                                0, nullptr};
    void* residuals[] = {b.residual.data()};
    auto call = cgx::make<cgx_collective_t>();
    call.dtype = static_cast<int32_t>(b.dtype);
    call.config = config;
    call.config.algorithm = CGX_ONE_SHOT;
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

// A measured config as text, and its name in the output.
struct Setting {
  std::string name;
  std::string config;
  bool residual = true;  // whether error feedback converges
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (int bits = 1; bits <= 8; ++bits)
    for (const char* rounding : {"nearest", "stochastic", "shift"})
      all.push_back({cgx::join("uniform ", bits, " ", rounding),
                     cgx::join("bits=", bits, " rounding='", rounding, "'"), bits > 1});
  for (int bits = 1; bits <= 4; ++bits)
    all.push_back(
        {cgx::join("levels ", bits, " nearest"), cgx::join("bits=", bits, " compressor='levels'")});
  for (const char* rest :
       {"sign 1 nearest", "onebit 1 nearest", "ternary 1.6 stochastic", "half 16 nearest",
        "half 16 stochastic", "mxfp8 8.25 nearest", "mxfp8 8.25 stochastic",
        "mxfp8_e5m2 8.25 nearest", "mxfp4 4.25 nearest", "mxfp4 4.25 stochastic",
        "nvfp4 4.56 nearest", "nvfp4 4.56 stochastic"}) {
    const std::string text = rest, name = text.substr(0, text.find(' '));
    const std::string rounding = text.substr(text.rfind(' ') + 1);
    all.push_back({text, cgx::join("rounding='", rounding, "' compressor='", name, "'"),
                   name != "sign" && name != "ternary"});
  }
  for (const int bits : {4, 8})
    all.push_back({cgx::join("qsgd ", bits, " stochastic"),
                   cgx::join("bits=", bits, " compressor='qsgd'"), bits == 8});
  all.push_back({"levels,rotation=32 2 nearest", "bits=2 compressor='levels' rotation=32"});
  for (const char* name : {"topk", "randk"})
    all.push_back({cgx::join(name, ",density=0.01 32 nearest"),
                   cgx::join("bucket_size=4096 compressor='", name, "' density=0.01")});
  all.push_back({"topk,density=0.01 8 nearest",
                 "bucket_size=4096 compressor='topk' density=0.01 value_bits=8"});
  for (const int rate : {1, 2, 4})
    all.push_back(
        {cgx::join("entropy ", rate, " nearest"), cgx::join("compressor='entropy' rate=", rate)});
  all.push_back({"entropy 2 shift", "rounding='shift' compressor='entropy' rate=2",
                 /*residual=*/false});
  all.push_back({"lossless 32 nearest", "compressor='lossless'", /*residual=*/false});
  return all;
}

void add_cases(Buffers& b, const std::string& dtype, std::vector<Case>& cases) {
  cases.push_back({dtype + " memcpy - 32 -", [&b] {
                     std::memcpy(b.result.data(), b.values.data(), b.numel * size_of(b.dtype));
                   }});
  for (const Setting& setting : settings()) {
    const cgx_config_t config = cgx::parse_config(setting.config);
    std::unique_ptr<cgx::Codec> made = cgx::make_codec(cgx::settings_of(config, b.dtype));
    if (!made->fixed_length()) made = cgx::make_framed(std::move(made));
    const std::shared_ptr<cgx::Codec> codec = std::move(made);
    const cgx::Rounding rounding{.mode = cgx::rounding_of(config), .seed = 1};
    const auto room = std::make_shared<std::vector<std::byte>>(codec->max_bytes(b.numel));
    const auto encode = [=, &b] {
      return codec->encode(b.dtype, b.values.data(), b.numel, 0, rounding, room->data());
    };
    const int64_t length = encode();
    const auto bytes =
        std::make_shared<std::vector<std::byte>>(room->begin(), room->begin() + length);
    cases.push_back({dtype + " quantize " + setting.name, [=] { encode(); }});
    if (setting.residual) {
      const auto feedback = std::make_shared<Feedback>(b, config);
      cases.push_back({dtype + " quantize-residual " + setting.name, [=] { feedback->encode(); }});
    }
    cases.push_back({dtype + " dequantize " + setting.name,
                     [=, &b] { codec->decode(*bytes, b.numel, 0, b.dtype, b.result.data()); }});
    if (b.dtype != cgx::Dtype::kFloat32) continue;  // sums are always fp32
    cases.push_back({dtype + " dequantize-add " + setting.name, [=, &b] {
                       codec->decode_add(*bytes, b.numel, 0, b.sum.data(), b.sum.data());
                     }});
  }
}

// The entropy coder: blocks of 65,536 symbols of 2.1 bits, which are rounded Gaussian values.
class Coder {
 public:
  explicit Coder(int64_t numel) : symbols_(numel), decoded_(numel) {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (uint8_t& symbol : symbols_) {
      const int level = static_cast<int>(std::lround(normal(generator)));
      symbol = static_cast<uint8_t>(level > 0 ? 2 * level - 1 : -2 * level);
    }
    cgx::Counts counts;
    cgx::kernels().count_symbols(symbols_.data(), numel, counts.data());
    frequencies_ = cgx::frequencies_of(counts);
    for_blocks([&](int64_t /*first*/, int64_t count, int lanes) {
      streams_.emplace_back(cgx::most_rans_bytes(count, lanes));
    });
    sizes_.resize(streams_.size());
  }
  void encode() {
    for_blocks([&](int64_t first, int64_t count, int lanes) {
      const int64_t block = first / kBlock;
      sizes_[block] = cgx::kernels().rans_encode(symbols_.data() + first, count, lanes,
                                                 frequencies_.data(), streams_[block].data());
    });
  }
  void decode() {
    for_blocks([&](int64_t first, int64_t count, int lanes) {
      const int64_t block = first / kBlock;
      cgx::kernels().rans_decode(streams_[block].data(), sizes_[block], count, lanes,
                                 frequencies_.data(), decoded_.data() + first);
    });
  }

 private:
  static constexpr int64_t kBlock = 65536;
  template <typename Work>
  void for_blocks(const Work& work) const {
    const auto numel = static_cast<int64_t>(symbols_.size());
    for (int64_t first = 0; first < numel; first += kBlock) {
      const int64_t count = std::min(kBlock, numel - first);
      work(first, count, cgx::rans_lanes(count));
    }
  }
  std::vector<uint8_t> symbols_, decoded_;
  cgx::Frequencies frequencies_;
  std::vector<std::vector<std::byte>> streams_;
  std::vector<int64_t> sizes_;
};

void add_coder_cases(int64_t numel, std::vector<Case>& cases) {
  const auto coder = std::make_shared<Coder>(numel);
  coder->encode();
  cases.push_back({"fp32 rans-encode symbols 2.1 -", [=] { coder->encode(); }});
  cases.push_back({"fp32 rans-decode symbols 2.1 -", [=] { coder->decode(); }});
}

// Returns the mean seconds of `calls` calls. Short operations are timed together.
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
  if (!(mode == "time" && argc >= 4) && !(mode == "count" && argc == 3)) {
    std::fprintf(
        stderr,
        "usage: codec_bench time NUMEL ROUNDS [COMPRESSOR ...] | codec_bench count NUMEL\n");
    return 2;
  }
  const cgx::FloatMode float_mode;
  const int64_t numel = std::atoll(argv[2]);
  Buffers fp32(cgx::Dtype::kFloat32, numel), bf16(cgx::Dtype::kBfloat16, numel);
  std::vector<Case> cases;
  add_cases(fp32, "fp32", cases);
  add_cases(bf16, "bf16", cases);
  add_coder_cases(numel, cases);

  if (mode == "time" && argc > 4) {
    std::erase_if(cases, [=](const Case& each) {
      return std::none_of(argv + 4, argv + argc, [&](const char* compressor) {
        return each.name.find(cgx::join(" ", compressor, " ")) != std::string::npos;
      });
    });
  }
  std::vector<std::vector<double>> samples(cases.size());
  const int rounds =
      mode == "time" ? std::atoi(argv[3]) + 1 : 0;  // the first round warms up memory
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
