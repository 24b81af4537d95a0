// Collectives on simulated devices (fake_device.h), compared with the same calls on CPUs.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "connect.h"
#include "fake_device.h"
#include "ranks.h"
#include "throwing.h"

namespace cgx {

using device::FakeDevice;
using device::FakeQueue;
using Seconds = Communicator::Seconds;

// A job whose ranks are threads, each with a simulated device.
struct Job {
  Job(int size, const std::string& type, double timeout_s = 60) {
    static int jobs = 0;
    communicators =
        connect_local(join("job", jobs++), std::vector<int>(size, 0), Seconds(timeout_s), type);
    for (int rank = 0; rank < size; ++rank) devices.push_back(std::make_unique<FakeDevice>(rank));
  }
  ~Job() {
    run([&](int rank) { communicators[rank]->close(); });
  }
  int size() const { return static_cast<int>(communicators.size()); }
  void run(const std::function<void(int rank)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank)
      threads.emplace_back([&, rank] {
        const FloatMode mode;
        body(rank);
      });
    for (auto& thread : threads) thread.join();
  }
  std::vector<std::unique_ptr<FakeDevice>> devices;  // destroyed after the communicators
  std::vector<CommunicatorRef> communicators;
};

struct Case {
  cgx_verb_t verb = CGX_ALLREDUCE;
  cgx_dtype_t dtype = CGX_FLOAT32;
  cgx_op_t op = CGX_SUM;
  cgx_algorithm_t algorithm = CGX_AUTO;
  cgx_rounding_t rounding = CGX_NEAREST;
  std::vector<int64_t> numels = {1000};
  int bits = 4;
  int64_t bucket_size = 512;
  int gather_bits = 0;
  cgx_compressor_t compressor = CGX_UNIFORM;
  int rotation = 0, value_bits = 0;
  int64_t density = 0;
  bool clip = false;
  bool skip = false, residuals = false, in_place = false;
  bool one_seed = false, seeds_on_device = false;
  bool splits = false;  // blocks of other sizes for each pair of ranks, up to numels[0]
  int64_t divisor = 0;

  std::string text() const {
    std::string sizes;
    for (const int64_t numel : numels) sizes += join(" ", numel);
    return join("verb ", verb, " dtype ", dtype, " op ", op, " algorithm ", algorithm, " rounding ",
                rounding, " compressor ", compressor, " rotation ", rotation, " bits ", bits, "/",
                gather_bits, " bucket ", bucket_size, " skip ", skip, " residuals ", residuals,
                " in place ", in_place, " splits ", splits, " sizes", sizes.substr(0, 80));
  }
};

// One rank's call with its own buffers.
class Rank {
 public:
  Rank(const Case& given, int rank, int size, const std::string& name = "")
      : case_(given), name_(name) {
    int64_t offset = 0;
    for (const int64_t given_numel : given.numels) {
      const int64_t numel = given.splits ? 0 : given_numel;
      segments_.push_back({offset, numel, given.bucket_size, given.bits, 0, nullptr});
      offset += numel;
      seeds_.push_back(offset * 31 + (given.compressor == CGX_RANDK ? 0 : rank));
    }
    const int64_t item = given.dtype == CGX_FLOAT32 ? 4 : 2;
    int64_t sent = offset * (verb_of(given.verb).blocks_in ? size : 1);
    int64_t received = offset * (verb_of(given.verb).blocks_out ? size : 1);
    for (int peer = 0; given.splits && peer < size; ++peer) {
      sent_.push_back(block(rank, peer));
      received_.push_back(block(peer, rank));
      sent += sent_.back();
      received += received_.back();
    }
    input_.resize(sent * item);
    output_.resize(received * item, std::byte{0x5a});
    std::mt19937 random(100 * rank + 7);
    std::normal_distribution<float> normal;
    std::vector<float> values(sent);
    for (float& value : values) value = normal(random);
    kernels().convert(Dtype::kFloat32, values.data(), static_cast<Dtype>(given.dtype),
                      input_.data(), values.size());
    call = cgx::make<cgx_collective_t>();
    call.verb = given.verb;
    call.dtype = given.dtype;
    call.op = given.op;
    call.config.algorithm = given.algorithm;
    call.config.rounding = given.rounding;
    call.config.gather_bits = given.gather_bits;
    call.config.compressor = given.compressor;
    call.config.rotation = given.rotation;
    call.config.clip = given.clip;
    call.config.density = given.density;
    call.config.value_bits = given.value_bits;
    call.config.skip_incomplete_buckets = given.skip;
    call.divisor = given.divisor;
    call.input = input_.data();
    call.output = given.in_place ? input_.data() : output_.data();
    call.segments = segments_.data();
    call.num_segments = static_cast<int64_t>(segments_.size());
    call.block_numel = offset;
    if (given.splits) call.input_splits = sent_.data();
    if (given.splits) call.output_splits = received_.data();
    call.name = name_.c_str();
    call.occurrence = -1;
    if (given.residuals) {
      residuals_.resize(sent * item);
      for (float& value : values) value = normal(random) / 8;
      kernels().convert(Dtype::kFloat32, values.data(), static_cast<Dtype>(given.dtype),
                        residuals_.data(), values.size());
      for (const auto& segment : segments_)
        residual_at_.push_back(residuals_.data() + segment.offset * item);
      call.residuals = residual_at_.data();
    }
  }
  // Make it a call on the CPU, or on a device.
  void use_cpu() {
    call.device = CGX_CPU;
    give_seeds(/*on_device=*/false);
  }
  void use(FakeQueue& stream) {
    call.device = CGX_CUDA;
    call.stream = &stream;
    give_seeds(case_.seeds_on_device);
  }
  // Runs the call on the CPU
  void run(Communicator& communicator) {
    use_cpu();
    communicator.run(call);
  }
  // Runs the call on the device
  void enqueue(Communicator& communicator, FakeDevice& device, FakeQueue& stream) {
    use(stream);
    communicator.enqueue(call, device);
  }
  std::vector<std::byte> result() const {
    std::vector<std::byte> all = case_.in_place ? input_ : output_;
    all.insert(all.end(), residuals_.begin(), residuals_.end());
    return all;
  }
  bool all_nan() const {
    for (size_t i = 0; i + 4 <= output_.size(); i += 4) {
      float value;
      std::memcpy(&value, output_.data() + i, 4);
      if (!std::isnan(value)) return false;
    }
    return true;
  }

  cgx_collective_t call;

  // Elements from one rank to another: none, or up to numels[0]. It may be changed.
  std::vector<int64_t> sent_, received_;

 private:
  int64_t block(int from, int to) const {
    return (from * 7 + to * 3 + 1) % 5 * case_.numels[0] / 4;
  }
  void give_seeds(bool on_device) {
    const int64_t* const seeds = seeds_.data();
    call.seed = case_.one_seed && !on_device ? *seeds : 0;
    call.seeds = case_.one_seed || on_device ? nullptr : seeds;
    call.device_seed = case_.one_seed && on_device ? seeds : nullptr;
    call.device_seeds = !case_.one_seed && on_device ? seeds : nullptr;
  }

  const Case case_;
  const std::string name_;
  std::vector<cgx_segment_t> segments_;
  std::vector<int64_t> seeds_;
  std::vector<std::byte> input_, output_, residuals_;
  std::vector<void*> residual_at_;
};

// Differences between the calls of two ranks, and the expected texts: on own wires, and on NCCL.
struct Disagreement {
  std::function<void(Rank*)> change;
  const char *ours, *library;
};
inline const Disagreement kDisagreements[] = {
    {[](Rank* r) { r->call.config.rounding = CGX_STOCHASTIC; }, "rounding", "rounding"},
    {[](Rank* r) { r->call.op = CGX_AVG; }, "op", "op"},
    {[](Rank* r) { r->call.name = "other"; }, "disagree", "name"}};

// Runs the case on CPUs and on devices; the results must be bitwise equal.
inline void compare(const Job& job, const Case& one, int64_t* compared) {
  job.run([&](int rank) {
    Rank cpu(one, rank, job.size()), gpu(one, rank, job.size());
    FakeQueue stream(rank);
    cpu.run(*job.communicators[rank]);
    gpu.enqueue(*job.communicators[rank], *job.devices[rank], stream);
    stream.synchronize();
    job.communicators[rank]->check_devices(false);
    CHECK(cpu.result() == gpu.result(), "rank %d of %d differs: %s", rank, job.size(),
          one.text().c_str());
  });
  ++*compared;
}

// ---- cases ---------------------------------------------------------------------------------

inline constexpr cgx_verb_t kEveryVerb[] = {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER,
                                            CGX_ALL_TO_ALL};

// Every compressor that devices support, with every verb and algorithm.
inline std::vector<Case> cases_of_compressors() {
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
                      {CGX_RANDK, CGX_NEAREST, 4, 0, true, 50'000'000},
                      {CGX_MXFP8, CGX_STOCHASTIC, 4, 0, true},
                      {CGX_MXFP8_E5M2, CGX_NEAREST, 4, 0, true},
                      {CGX_MXFP4, CGX_NEAREST, 4, 32, true},
                      {CGX_NVFP4, CGX_NEAREST, 4, 0, true},
                      {CGX_NVFP4, CGX_STOCHASTIC, 4, 64, true}};
  std::vector<Case> all;
  int turn = 0;
  for (const Row& row : rows)
    for (const auto dtype : {CGX_FLOAT32, CGX_FLOAT16, CGX_BFLOAT16})
      for (const auto verb : kEveryVerb)
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
          one.op = turn % 2 && verb_of(verb).reduces ? CGX_AVG : CGX_SUM;
          one.residuals = row.residuals && turn % 3 != 0 && verb_of(verb).residuals;
          one.skip = row.compressor != CGX_SIGN && turn % 5 == 0;
          one.in_place = turn % 7 == 0 && verb == CGX_ALLREDUCE;
          one.numels = {700, 3, 5000, 16, 1037};
          ++turn;
          all.push_back(one);
        }
  return all;
}

// Every verb, dtype, bit width, rounding, compressor and algorithm, and lists of segments.
inline std::vector<Case> cases() {
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
      for (const auto verb : kEveryVerb)
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
    for (const int bits : {2, 4, 32})
      add([&](Case* c) {
        c->verb = CGX_REDUCE_SCATTER;
        c->dtype = dtype;
        c->bits = bits;
        c->op = bits == 2 ? CGX_SUM : CGX_AVG;
        c->rounding = CGX_STOCHASTIC;
        c->residuals = true;
        c->numels = {700, 0, 3, 20'000};
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
  for (const auto verb : kEveryVerb)
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
  for (const int64_t numel : {0, 16, 513, 40'000, 3'000'000})  // the last: several rounds
    for (const int bits : {4, 32})
      add([&](Case* c) {
        c->verb = CGX_ALL_TO_ALL;
        c->splits = true;
        c->numels = {numel};
        c->bits = bits;
        c->rounding = CGX_STOCHASTIC;
      });
  for (const Case& one : cases_of_compressors()) all.push_back(one);
  return all;
}

inline Case case_of(int64_t numel, cgx_verb_t verb, cgx_algorithm_t algorithm) {
  Case one;
  one.numels = {numel};
  one.verb = verb;
  one.algorithm = algorithm;
  one.rounding = CGX_STOCHASTIC;
  return one;
}

// The cases for a wire: every verb and algorithm at each length, and segments.
inline std::vector<Case> cases_of_lengths(const std::vector<int64_t>& numels) {
  std::vector<Case> all;
  for (const int64_t numel : numels) {
    all.push_back(case_of(numel, CGX_ALLREDUCE, CGX_ONE_SHOT));
    for (const auto verb : kEveryVerb) all.push_back(case_of(numel, verb, CGX_SRA));
  }
  Case segments;
  segments.numels = {700, 3, 1000, 16, 90};
  segments.dtype = CGX_BFLOAT16;
  segments.algorithm = CGX_SRA;
  segments.gather_bits = 8;
  segments.skip = segments.residuals = true;
  all.push_back(segments);
  Case splits = case_of(40'000, CGX_ALL_TO_ALL, CGX_SRA);
  splits.splits = true;
  all.push_back(splits);
  return all;
}

// Queues many calls on two streams without waiting; results must equal those on CPUs.
inline void compare_many_at_once(const Job& job, int calls) {
  job.run([&](int rank) {
    FakeQueue streams[2] = {FakeQueue(rank), FakeQueue(rank + 10)};
    std::vector<std::unique_ptr<Rank>> cpu, gpu;
    for (int i = 0; i < calls; ++i) {
      Case one;
      one.numels = {100 + 997 * i};
      one.algorithm = i % 3 ? CGX_SRA : CGX_ONE_SHOT;
      cpu.push_back(std::make_unique<Rank>(one, rank, job.size()));
      gpu.push_back(std::make_unique<Rank>(one, rank, job.size()));
      cpu.back()->run(*job.communicators[rank]);
    }
    for (int i = 0; i < calls; ++i)
      gpu[i]->enqueue(*job.communicators[rank], *job.devices[rank], streams[i / 2 % 2]);
    job.communicators[rank]->check_devices(true);
    for (int i = 0; i < calls; ++i) CHECK(cpu[i]->result() == gpu[i]->result(), "call %d", i);
  });
}

}  // namespace cgx
