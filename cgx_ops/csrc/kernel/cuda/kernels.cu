// Launches and loads all kernels.
#include <cuda_runtime.h>

#include "base/status.h"
#include "kernel/cuda/assign.h"
#include "kernel/cuda/entry_points.h"
#include "kernel/cuda/kernels.h"

namespace cgx::device::cuda {
namespace {

// Throws unless a CUDA call succeeded. Clears CUDA's last error.
void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(CGX_SYSTEM, what, ": ", cudaGetErrorString(status));
}

void enqueue(const void* kernel, int blocks, int threads, void** arguments, void* stream) {
  require_success(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)),
                                   dim3(static_cast<unsigned>(threads)), arguments, 0,
                                   static_cast<cudaStream_t>(stream)),
                  "launching a kernel");
}

template <typename Launch>
const void* general_kernel_of(Formats formats, Dtype dtype, Takers takers) {
  if (formats == Formats::kPlain) return general_kernel<Formats::kPlain, Launch>(dtype, takers);
  if (formats == Formats::kAny) return general_kernel<Formats::kAny, Launch>(dtype, takers);
  if (formats == Formats::kBlocks) return general_kernel<Formats::kBlocks, Launch>(dtype, takers);
  return general_kernel<Formats::kSparse, Launch>(dtype, takers);
}

template <typename Launch>
void launch_all(const Launch& launch, int processors, void* stream) {
  static_assert(sizeof(Launch) + sizeof(Work) <= 4096, "kernel parameters");
  for_kernels(launch, [&](const Launch& part, const Kernel& kernel) {
    Work work;
    void* arguments[] = {const_cast<Launch*>(&part), &work};
    if (kernel.aligned) {
      work = work_of(part.pieces, aligned::tiles_of);
      enqueue(aligned::kernel<Launch>(part.dtype, *kernel.aligned, is_noisy(part)),
              aligned::blocks_for(work.items, processors), kPairLanes, arguments, stream);
    } else {
      work = work_of(part.pieces, buckets_of);
      enqueue(general_kernel_of<Launch>(kernel.formats, part.dtype, kernel.takers),
              groups_for(kernel.takers, work.items, processors), lanes_of(kernel.takers), arguments,
              stream);
    }
  });
}

void load(const void* kernel) {
  cudaFuncAttributes attributes;
  require_success(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}

template <typename Launch>
void load_all() {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    for (const Formats formats :
         {Formats::kPlain, Formats::kAny, Formats::kSparse, Formats::kBlocks})
      for (const Takers takers : {Takers::kWarps, Takers::kBlocks})
        load(general_kernel_of<Launch>(formats, dtype, takers));
    aligned::for_variants([&](const aligned::Variant& variant) {
      for (const bool noisy : {false, true}) load(aligned::kernel<Launch>(dtype, variant, noisy));
    });
  }
}

}  // namespace

void launch(const Encode& encode, int processors, void* stream) {
  launch_all(encode, processors, stream);
}
void launch(const Reduce& reduce, int processors, void* stream) {
  launch_all(reduce, processors, stream);
}
void launch(const Decode& decode, int processors, void* stream) {
  launch_all(decode, processors, stream);
}
void launch(const Signals& signals, void* stream) {
  void* arguments[] = {const_cast<Signals*>(&signals)};
  enqueue(signals_kernel(), 1, kWarpLanes, arguments, stream);
}

void load_kernels() {
  load_all<Encode>();
  load_all<Reduce>();
  load_all<Decode>();
  load(signals_kernel());
}

}  // namespace cgx::device::cuda
