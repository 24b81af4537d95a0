// Collectives on simulated devices (fake_device.h) with threads as ranks. Results must be bitwise
// equal to those on CPUs.
//
//   1. cases: every verb, dtype, bit width, rounding, algorithm and segment list, over both wires
//   2. order: many calls in flight, on several streams, without waiting
//   3. host cost: the operations of a call
//   4. the codec operations, and a group of one rank
//
// Failures are in device_failures_test.cc.
#include "algorithm/chunks.h"
#include "device/codec.h"
#include "device/rounds.h"
#include "device_cases.h"

namespace cgx {
namespace {

// ---- 1. cases ------------------------------------------------------------------------------

void cases_equal_the_cpus() {
  int64_t compared = 0;
  for (const std::string type : {"SHM", "MPI"})
    for (const int size : {1, 2, 3, 4, 8}) {
      const Job job(size, type);
      int number = 0;
      for (const Case& one : cases())  // other than three ranks: a third, and only small ones
        if (size == 3 || (++number % 3 == 0 && one.numels[0] < 100'000))
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

// ---- 3. host cost --------------------------------------------------------------------------

// Each operation and each checked address is a CUDA call. Making the device current takes four.
void calls_need_few_operations() {
  struct Row {
    const char* type;
    cgx_algorithm_t algorithm;
    int operations;
  };
  const Row rows[] = {{"SHM", CGX_ONE_SHOT, 5},
                      {"SHM", CGX_SRA, 7},
                      {"MPI", CGX_ONE_SHOT, 13},
                      {"MPI", CGX_SRA, 19}};
  for (const Row& row : rows) {
    const Job job(2, row.type);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      FakeDevice& device = *job.devices[rank];
      Rank first({}, rank, job.size());
      first.enqueue(*job.communicators[rank], device, stream);  // connects
      for (const bool in_place : {false, true}) {
        Rank call({.algorithm = row.algorithm, .in_place = in_place}, rank, job.size());
        FakeQueue::operations = device.times_current = device.addresses_checked = 0;
        call.enqueue(*job.communicators[rank], device, stream);
        CHECK(FakeQueue::operations == row.operations && device.times_current == 1 &&
                  device.addresses_checked == (in_place ? 1 : 2),
              "%s, algorithm %d: %d operations, current %d times, %d addresses", row.type,
              row.algorithm, FakeQueue::operations, device.times_current.load(),
              device.addresses_checked.load());
        job.communicators[rank]->check_devices(true);
      }
    });
  }
}

// ---- 4. the codec, and a group of one rank -------------------------------------------------

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
  calls_need_few_operations();
  codec_operations();
  single_rank();
  std::puts("device_test: passed");
}
