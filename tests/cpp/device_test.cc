// Collectives on simulated devices (fake_device.h) with threads as ranks. Results must be bitwise
// equal to those on CPUs.
//
//   1. cases: every verb, dtype, bit width, rounding, algorithm and segment list, over both wires
//   2. order: many calls in flight, on several streams, without waiting
//   3. the codec operations, and a group of one rank
//
// Failures are in device_failures_test.cc.
#include "algorithm/chunks.h"
#include "device/codec.h"
#include "device/rounds.h"
#include "device_cases.h"

namespace cgx {
namespace {

// ---- 1. cases ------------------------------------------------------------------------------

// Every compressor that devices support, with every verb and algorithm.
std::vector<Case> cases_of_compressors() {
  struct Row {
    cgx_compressor_t compressor;
    cgx_rounding_t rounding;
    int bits, rotation;
    bool residuals;
    int64_t density = 0;
    int value_bits = 0;
  };
  const Row rows[] = {{CGX_UNIFORM, CGX_SHIFT, 4, 32, true},
                      {CGX_LEVELS, CGX_NEAREST, 1, 0, true},
                      {CGX_LEVELS, CGX_NEAREST, 2, 32, true},
                      {CGX_SIGN, CGX_NEAREST, 4, 0, false},
                      {CGX_ONEBIT, CGX_NEAREST, 4, 0, true},
                      {CGX_TERNARY, CGX_STOCHASTIC, 4, 0, true},
                      {CGX_TERNARY, CGX_STOCHASTIC, 4, 64, true},
                      {CGX_QSGD, CGX_STOCHASTIC, 4, 0, false},
                      {CGX_HALF, CGX_STOCHASTIC, 4, 0, true},
                      {CGX_HALF, CGX_NEAREST, 4, 0, true},
                      {CGX_TOPK, CGX_NEAREST, 4, 0, true, 10'000'000},
                      {CGX_TOPK, CGX_NEAREST, 4, 0, true, 100'000'000, 16},
                      {CGX_RANDK, CGX_NEAREST, 4, 0, true, 50'000'000}};
  std::vector<Case> all;
  int turn = 0;
  for (const Row& row : rows)
    for (const auto dtype : {CGX_FLOAT32, CGX_FLOAT16, CGX_BFLOAT16})
      for (const auto verb : {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
        for (const auto algorithm : {CGX_ONE_SHOT, CGX_SRA}) {
          if (verb != CGX_ALLREDUCE && algorithm == CGX_ONE_SHOT) continue;
          Case one;
          one.compressor = row.compressor;
          one.rounding = row.rounding;
          one.bits = row.bits;
          one.rotation = row.rotation;
          one.density = row.density;
          one.value_bits = row.value_bits;
          one.clip = row.compressor == CGX_TERNARY && row.residuals;
          one.dtype = dtype;
          one.verb = verb;
          one.algorithm = algorithm;
          one.op = turn % 2 && verb != CGX_ALL_GATHER ? CGX_AVG : CGX_SUM;
          one.residuals = row.residuals && turn % 3 != 0 && verb == CGX_ALLREDUCE;
          one.skip = row.compressor != CGX_SIGN && turn % 5 == 0;
          one.in_place = turn % 7 == 0 && verb == CGX_ALLREDUCE;
          one.numels = {700, 3, 5000, 16, 1037};
          ++turn;
          all.push_back(one);
        }
  return all;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::function<void(Case*)>& change) {
    all.emplace_back();
    change(&all.back());
  };
  for (const int64_t numel : {0, 1, 17, 511, 512, 513, 40'000, (1 << 20) + 7})
    for (const auto algorithm : {CGX_AUTO, CGX_ONE_SHOT, CGX_SRA})
      if (numel < 100'000 || algorithm == CGX_AUTO)
        add([&](Case* c) {
          c->numels = {numel};
          c->algorithm = algorithm;
          c->rounding = CGX_STOCHASTIC;
        });
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8, 32})
    for (const auto dtype : {CGX_FLOAT32, CGX_FLOAT16, CGX_BFLOAT16})
      for (const auto verb : {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
        add([&](Case* c) {
          c->bits = bits;
          c->dtype = dtype;
          c->verb = verb;
          c->numels = {5000};
          c->rounding = bits % 2 ? CGX_STOCHASTIC : CGX_SHIFT;
        });
  for (const auto op : {CGX_AVG, CGX_MIN, CGX_MAX, CGX_PRODUCT})
    add([&](Case* c) {
      c->op = op;
      c->bits = op == CGX_AVG ? 4 : 32;
      c->divisor = op == CGX_AVG ? 7 : 0;
      c->algorithm = CGX_SRA;
    });
  for (const bool skip : {false, true})
    for (const auto algorithm : {CGX_ONE_SHOT, CGX_SRA})
      for (const int gather_bits : {0, 8, 32})
        add([&](Case* c) {
          c->skip = skip;
          c->algorithm = algorithm;
          c->gather_bits = gather_bits;
          c->residuals = true;
          c->op = gather_bits == 8 ? CGX_AVG : CGX_SUM;
          c->numels = {700, 3, 1000, 16, 90};
        });
  for (const auto dtype : {CGX_FLOAT32, CGX_FLOAT16, CGX_BFLOAT16})
    for (const auto algorithm : {CGX_ONE_SHOT, CGX_SRA})
      for (const int bits : {4, 32})
        add([&](Case* c) {
          c->dtype = dtype;
          c->algorithm = algorithm;
          c->bits = bits;
          c->op = CGX_AVG;
          c->divisor = 5;
          c->rounding = CGX_STOCHASTIC;
          c->residuals = true;
          c->in_place = bits == 4;
          c->numels = {700, 0, 3, 20'000};
        });
  add([](Case* c) {
    c->numels.assign(100, 300);  // more than one launch holds
    c->numels[7] = 0;
    c->algorithm = CGX_SRA;
    c->in_place = true;
    c->seeds_on_device = true;
    c->rounding = CGX_STOCHASTIC;
  });
  for (const auto verb : {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
    for (const bool on_device : {false, true})
      add([&](Case* c) {  // all noise derives from one seed
        c->verb = verb;
        c->numels.assign(40, 100);
        c->one_seed = true;
        c->seeds_on_device = on_device;
        c->rounding = CGX_STOCHASTIC;
      });
  add([](Case* c) {
    c->numels = {3'000'000, 17, 2'000'000};  // several rounds
    c->bits = 8;
    c->gather_bits = 4;
    c->rounding = CGX_STOCHASTIC;
    c->residuals = true;
  });
  for (const Case& one : cases_of_compressors()) all.push_back(one);
  return all;
}

void cases_equal_the_cpus() {
  int64_t compared = 0;
  for (const std::string type : {"SHM", "MPI"})
    for (const int size : {1, 2, 3, 4, 8}) {
      const Job job(size, type);
      int number = 0;
      for (const Case& one : cases())  // many ranks: a third of the cases, and only small ones
        if (size <= 3 || (++number % 3 == 0 && one.numels[0] < 100'000))
          compare(job, one, &compared);
      if (size > 1)
        CHECK(
            std::string(job.communicators[0]->wire_name()) == (type == "SHM" ? "direct" : "staged"),
            "%s", job.communicators[0]->wire_name());
    }
  std::printf("%lld cases equal CPU results\n", static_cast<long long>(compared));
}

// ---- 2. order ------------------------------------------------------------------------------

void many_in_flight_on_several_streams() {
  for (const std::string type : {"SHM", "MPI"}) compare_many_at_once(Job(3, type), 24);
}

// ---- 3. the codec, and a group of one rank -------------------------------------------------

void codec_operations() {
  for (const int bits : {3, 4, 8, 32})
    for (const bool skip : {false, true}) {
      constexpr int64_t kNumel = 5000, kFirst = 1024, kMessages = 3;
      auto codec = cgx::make<cgx_codec_t>();
      codec.config.bits = bits;
      codec.config.bucket_size = 512;
      codec.config.rounding = CGX_STOCHASTIC;
      codec.config.skip_incomplete_buckets = skip;
      codec.seed = 5;
      codec.rank = 2;
      codec.phase = 1;
      codec.first_index = kFirst;
      int64_t bytes = 0;
      ok(cgx_encoded_bytes(&codec, kNumel, &bytes));
      std::vector<float> values(kMessages * kNumel);
      std::mt19937 random(bits);
      std::normal_distribution<float> normal;
      for (float& value : values) value = normal(random);

      const device::Run run{
          {Dtype::kFloat32, bits, 512, skip}, {RoundingMode::kStochastic, 5, 2, 1}, kNumel, kFirst};
      FakeQueue queue(1);
      using Buffer = std::vector<std::byte>;
      Buffer cpu(kMessages * bytes), gpu(kMessages * bytes), cpu_sum(bytes), gpu_sum(bytes);
      for (int64_t i = 0; i < kMessages; ++i) {
        ok(cgx_quantize(&codec, &values[i * kNumel], kNumel, &cpu[i * bytes], nullptr));
        device::quantize(queue, run, &values[i * kNumel], &gpu[i * bytes]);
      }
      ok(cgx_sum_encoded(&codec, cpu.data(), kMessages, bytes, kNumel, cpu_sum.data()));
      device::sum_encoded(queue, run, gpu.data(), kMessages, bytes, gpu_sum.data());
      std::vector<float> cpu_values(kNumel), gpu_values(kNumel);
      ok(cgx_dequantize(&codec, cpu_sum.data(), bytes, kNumel, cpu_values.data()));
      device::dequantize(queue, run, gpu_sum.data(), gpu_values.data());
      queue.synchronize();
      CHECK(cpu == gpu && cpu_sum == gpu_sum && cpu_values == gpu_values, "%d bits, skip %d", bits,
            skip);
    }
}

// A single rank gets its input back, except that averages are divided and residuals are added.
void single_rank() {
  constexpr int64_t kNumel = 100'003;
  using Buffer = std::vector<std::byte>;
  struct Buffers {
    Buffer input, output, residual;
    bool operator==(const Buffers&) const = default;
  };
  const cgx_segment_t segments[] = {{0, kNumel / 2, 512, 4, 0, nullptr},
                                    {kNumel / 2, 17, 512, 32, 0, nullptr}};
  for (const auto dtype : {CGX_FLOAT32, CGX_FLOAT16, CGX_BFLOAT16})
    for (const auto op : {CGX_SUM, CGX_AVG})
      for (const bool has_residual : {false, true})
        for (const bool in_place : {false, true}) {
          const std::string where =
              join("dtype ", dtype, " op ", op, " residual ", has_residual, " in place ", in_place);
          const int64_t item = dtype == CGX_FLOAT32 ? 4 : 2;
          std::mt19937 random(1);
          const auto numbers = [&](float scale) {
            std::vector<float> values(kNumel);
            for (float& value : values) value = scale * std::normal_distribution<float>()(random);
            Buffer buffer(kNumel * item);
            kernels().convert(Dtype::kFloat32, values.data(), static_cast<Dtype>(dtype),
                              buffer.data(), kNumel);
            return buffer;
          };
          const Buffers before{numbers(1.0f), Buffer(kNumel * item), numbers(0.125f)};
          Buffers cpu = before, gpu = before;
          const auto run = [&](Buffers& at, const auto& pass) {
            void* residuals[] = {at.residual.data(), at.residual.data() + kNumel / 2 * item};
            auto call = cgx::make<cgx_collective_t>();
            call.dtype = dtype;
            call.op = op;
            call.divisor = 3;
            call.segments = segments;
            call.num_segments = std::size(segments);
            call.input = at.input.data();
            call.output = in_place ? at.input.data() : at.output.data();
            if (has_residual) call.residuals = residuals;
            pass(make_plan(call, 0, 1));
          };
          run(cpu, [](const Plan& plan) { pass_through(plan); });
          run(gpu, [](const Plan& plan) {
            FakeQueue queue(0);
            device::pass_through(plan, queue);
            queue.synchronize();
          });
          CHECK(cpu == gpu, "%s", where.c_str());
          const Buffer& result = in_place ? gpu.input : gpu.output;
          const auto used = (kNumel / 2 + 17) * item;
          const bool unchanged =
              std::equal(result.begin(), result.begin() + used, before.input.begin());
          CHECK(unchanged == (op == CGX_SUM && !has_residual), "%s", where.c_str());
          const Buffer zeros(used);
          const bool is_zero = std::equal(zeros.begin(), zeros.end(), gpu.residual.begin());
          CHECK(is_zero == has_residual, "%s", where.c_str());
        }
}

}  // namespace
}  // namespace cgx

int main() {
  using namespace cgx;
  cases_equal_the_cpus();
  many_in_flight_on_several_streams();
  codec_operations();
  single_rank();
  std::puts("device_test: passed");
}
