// Collectives on devices, with threads for devices and ranks (fake_device.h), against the same on
// CPUs to the bit.
//
//   1. cases: every verb, dtype, width, rounding, algorithm, list of segments; both wires
//   2. order: many at once, on several streams, without waiting
//   3. the codec alone, a rank alone
//   4. failures: late, lost and disagreeing ranks; devices that cannot be connected
#include "algorithm/chunks.h"
#include "device/codec.h"
#include "device/rounds.h"
#include "device_cases.h"

namespace cgx {
namespace {

// ---- 1. cases ------------------------------------------------------------------------------

// Every compressor that devices have, by every verb and algorithm.
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
                      {CGX_NATURAL, CGX_STOCHASTIC, 4, 0, true},
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
    c->numels.assign(100, 300);  // more pieces than a launch holds
    c->numels[7] = 0;
    c->algorithm = CGX_SRA;
    c->in_place = true;
    c->seeds_on_device = true;
    c->rounding = CGX_STOCHASTIC;
  });
  for (const auto verb : {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
    for (const bool on_device : {false, true})
      add([&](Case* c) {  // noise of each segment and block follows from one seed
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
      for (const Case& one : cases())  // on many ranks a third, of the smaller
        if (size <= 3 || (++number % 3 == 0 && one.numels[0] < 100'000))
          compare(job, one, &compared);
      if (size > 1)
        CHECK(
            std::string(job.communicators[0]->wire_name()) == (type == "SHM" ? "direct" : "staged"),
            "%s", job.communicators[0]->wire_name());
    }
  std::printf("%lld cases equal the CPU's\n", static_cast<long long>(compared));
}

// ---- 2. order ------------------------------------------------------------------------------

void many_in_flight_on_several_streams() {
  for (const std::string type : {"SHM", "MPI"}) compare_many_at_once(Job(3, type), 24);
}

// ---- 3. the codec alone, a rank alone ------------------------------------------------------

void the_codec_alone() {
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

// What it gives, it gets; but an average has its divisor, and a residual is added and gone.
void a_rank_alone() {
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
          const bool kept = std::equal(result.begin(), result.begin() + used, before.input.begin());
          CHECK(kept == (op == CGX_SUM && !has_residual), "%s", where.c_str());
          const Buffer zeros(used);
          const bool gone = std::equal(zeros.begin(), zeros.end(), gpu.residual.begin());
          CHECK(gone == has_residual, "%s", where.c_str());
        }
}

// ---- 4. failures ---------------------------------------------------------------------------

void addresses_of_no_values_are_not_looked_at() {
  const Job job(1, "AUTO");
  FakeQueue stream(0);
  Rank call({.numels = {1000, 0}, .residuals = true}, 0, 1);
  job.devices[0]->freed = call.call.residuals[1];
  call.enqueue(*job.communicators[0], *job.devices[0], stream);
  stream.synchronize();
  job.devices[0]->freed = call.call.residuals[0];
  error_of([&] { call.enqueue(*job.communicators[0], *job.devices[0], stream); },
           CGX_INVALID_ARGUMENT);
}

void the_first_call_has_a_deadline_of_its_own() {
  const Job job(2, "SHM", 60);
  job.run([&](int rank) {
    if (rank == 1) return;
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    call.call.timeout_s = 0.5;
    const std::string text = error_of(
        [&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, CGX_TIMEOUT);
    CHECK(contains(text, "within 0.5 s"), "%s", text.c_str());
  });
}

void a_rank_that_never_comes_is_a_timeout() {
  for (const std::string type : {"SHM", "MPI"}) {
    const Job job(3, type, 60);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      Communicator& communicator = *job.communicators[rank];
      Rank good({}, rank, job.size()), bad({}, rank, job.size(), "lonely"),
          late({}, rank, job.size());
      good.enqueue(communicator, *job.devices[rank], stream);
      communicator.check_devices(true);
      if (rank == 1) return;
      bad.call.timeout_s = 0.3;
      bad.enqueue(communicator, *job.devices[rank], stream);
      late.call.timeout_s = 0.3;
      late.enqueue(communicator, *job.devices[rank],
                   stream);  // already on the stream when it fails
      stream.synchronize();
      CHECK(bad.all_nan() && late.all_nan(), "rank %d kept values", rank);
      try {
        communicator.check_devices(true);
        CHECK(false, "rank %d saw no failure", rank);
      } catch (const Error& error) {
        const bool told = error.status() == CGX_TIMEOUT || error.status() == CGX_PEER_FAILED;
        CHECK(told && contains(error.what(), "closed for devices"), "%s", error.what());
      }
      Rank next({}, rank, job.size());
      try {
        next.enqueue(communicator, *job.devices[rank], stream);
        CHECK(false, "rank %d could go on", rank);
      } catch (const Error&) {
      }
    });
  }
}

// The engine closes the communicator for the late rank before any call can ask for the failure.
void a_late_rank_is_named_after_the_communicator_is_closed() {
  const Job job(3, "MPI", 60);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    FakeDevice& device = *job.devices[rank];
    Rank good({}, rank, job.size());
    good.enqueue(communicator, device, stream);
    communicator.check_devices(true);
    if (rank == 1) return;
    Rank late({}, rank, job.size()), next({}, rank, job.size());
    late.call.timeout_s = rank == 0 ? 0.3 : 60;  // rank 0 notices it, and tells rank 2
    late.enqueue(communicator, device, stream);
    stream.synchronize();
    CHECK(communicator.closed(), "rank %d", rank);
    const cgx_status_t status = rank == 0 ? CGX_TIMEOUT : CGX_PEER_FAILED;
    const auto names_it = [](const std::string& text) {
      CHECK(contains(text, "'relay 0.0 of a device' (use 1) did not end"), "%s", text.c_str());
      CHECK(contains(text, "rank 1 has not started it"), "%s", text.c_str());
    };
    names_it(error_of([&] { next.enqueue(communicator, device, stream); }, status));
    names_it(error_of([&] { communicator.check_devices(true); }, status));
    names_it(error_of([&] { next.run(communicator); }, CGX_CLOSED));
  });
}

// Devices have had no part in the failure; or there are none yet.
void devices_of_a_closed_communicator_report_why() {
  for (const std::string type : {"SHM", "MPI"})
    for (const bool connected : {false, true}) {
      const Job job(2, type, 60);
      job.run([&](int rank) {
        FakeQueue stream(rank);
        Communicator& communicator = *job.communicators[rank];
        Rank call({}, rank, job.size()), lonely({}, rank, job.size());
        if (connected) call.enqueue(communicator, *job.devices[rank], stream);
        if (connected) communicator.check_devices(true);
        if (rank == 1) return;
        lonely.call.timeout_s = 0.3;
        error_of([&] { lonely.run(communicator); }, CGX_TIMEOUT);
        const std::string text =
            error_of([&] { call.enqueue(communicator, *job.devices[rank], stream); }, CGX_CLOSED);
        CHECK(contains(text, "rank 1 has not started it"), "%s", text.c_str());
      });
    }
}

void ranks_that_disagree_are_told_how() {
  for (const std::string type : {"SHM", "MPI"})
    for (const Disagreement& each : kDisagreements) {
      const Job job(2, type, 60);
      job.run([&](int rank) {
        FakeQueue stream(rank);
        Rank call({}, rank, job.size(), "mine");
        if (rank == 1) each.change(&call);
        call.enqueue(*job.communicators[rank], *job.devices[rank], stream);
        stream.synchronize();
        CHECK(call.all_nan(), "rank %d", rank);
        const std::string text =
            error_of([&] { job.communicators[rank]->check_devices(true); }, CGX_MISMATCH);
        CHECK(contains(text, each.ours), "%s", text.c_str());
      });
    }
}

void more_rounds_than_a_peer_is_a_mismatch_at_once() {
  const Job job(2, "MPI", 60);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Case one;
    one.numels = {rank == 0 ? 1000 : 20'000'000};  // one round, and ten
    Rank call(one, rank, job.size());
    call.enqueue(*job.communicators[rank], *job.devices[rank], stream);
    stream.synchronize();
    const std::string text =
        error_of([&] { job.communicators[rank]->check_devices(true); }, CGX_MISMATCH);
    CHECK(contains(text, "numel"), "%s", text.c_str());
    Rank cpu({}, rank, job.size());
    cpu.run(*job.communicators[rank]);  // the CPUs' communicator is whole
  });
}

void devices_that_do_not_reach_each_other_are_staged() {
  const Job job(3, "AUTO");
  job.devices[1]->reaches_peers = false;
  int64_t compared = 0;
  compare(job, {}, &compared);
  for (const auto& communicator : job.communicators)
    CHECK(std::string(communicator->wire_name()) == "staged", "%s", communicator->wire_name());

  const Job strict(2, "SHM");
  strict.devices[1]->reaches_peers = false;
  strict.run([&](int rank) {
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    const std::string text =
        error_of([&] { call.enqueue(*strict.communicators[rank], *strict.devices[rank], stream); },
                 CGX_SYSTEM);
    CHECK(contains(text, "rank 1") && contains(text, "does not reach"), "%s", text.c_str());
  });
}

void a_device_without_memory_is_everybodys_error() {
  const Job job(2, "AUTO");
  job.devices[0]->memory_left = 1000;
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    const std::string text = error_of(
        [&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, CGX_SYSTEM);
    CHECK(contains(text, "rank 0") && contains(text, "wanted"), "%s", text.c_str());
  });
}

void what_devices_refuse() {
  const Job job(2, "MPI");
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    Case ring;
    ring.algorithm = CGX_RING;
    Case wide;
    wide.numels = {4 << 20};
    wide.bucket_size = 4 << 20;
    const auto refused = [&](const Case& one, const char* part) {
      Rank call(one, rank, 2);
      const std::string text = error_of(
          [&] { call.enqueue(communicator, *job.devices[rank], stream); }, CGX_UNSUPPORTED);
      CHECK(contains(text, part), "%s", text.c_str());
    };
    refused(ring, "one_shot and sra");
    Case sparse;
    sparse.compressor = CGX_TOPK;
    sparse.density = 300'000'000;
    refused(sparse, "at most a fourth");
    sparse.density = 0;
    sparse.value_bits = 8;
    refused(sparse, "value_bits=8 is not there for devices");
    sparse.compressor = CGX_RANDK;
    sparse.value_bits = 0;
    sparse.seeds_on_device = true;
    refused(sparse, "give them on the host");
    Case whole;
    whole.compressor = CGX_THRESHOLD;
    refused(whole, "threshold is not there for devices");
    Case rotated;
    rotated.rotation = 64;
    rotated.bucket_size = 8193;
    rotated.numels = {20'000};
    refused(rotated, "8192");
    refused(wide, "bucket_size");
    job.devices[rank]->is_recording = true;
    refused({}, "recording");
    job.devices[rank]->is_recording = false;

    Rank call({}, rank, 2);
    error_of([&] { call.call.device = CGX_CUDA, communicator.run(call.call); },
             CGX_INVALID_ARGUMENT);
    FakeDevice other(9);
    const std::string text =
        error_of([&] { call.enqueue(communicator, other, stream); }, CGX_INVALID_ARGUMENT);
    CHECK(contains(text, "fake:9"), "%s", text.c_str());
  });
}

}  // namespace
}  // namespace cgx

int main() {
  using namespace cgx;
  cases_equal_the_cpus();
  many_in_flight_on_several_streams();
  the_codec_alone();
  a_rank_alone();
  addresses_of_no_values_are_not_looked_at();
  the_first_call_has_a_deadline_of_its_own();
  a_rank_that_never_comes_is_a_timeout();
  a_late_rank_is_named_after_the_communicator_is_closed();
  devices_of_a_closed_communicator_report_why();
  ranks_that_disagree_are_told_how();
  more_rounds_than_a_peer_is_a_mismatch_at_once();
  devices_that_do_not_reach_each_other_are_staged();
  a_device_without_memory_is_everybodys_error();
  what_devices_refuse();
  std::puts("device_test: all well");
}
