// Lets run_cuda_jax.py run the CUDA handlers of xla_ffi/ on XLA:CPU, on machines without a GPU.
// It is loaded by LD_PRELOAD, so that its cgx_enqueue overrides that of libcgx:
//
//   collective_execute, allreduce_q   call the handlers with a fake stream, since XLA:CPU has none
//   cgx_enqueue                       checks that the call uses this stream, and runs it on the
//                                     CPU; or fails as many times as fail_next() requests
#include <dlfcn.h>

#include <atomic>
#include <cstdint>

#include "cgx/cgx.h"
#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* handlers[2];
std::atomic<int32_t> failures{0};
void* const kStream = &failures;  // any address

template <typename F>
F* of_libcgx(const char* name) {
  static void* library = dlopen("libcgx.so", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<F*>(dlsym(library, name));
}

XLA_FFI_Error* get_stream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = kStream;
  return nullptr;
}

XLA_FFI_Error* call(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = get_stream;
  const XLA_FFI_Api* own = frame->api;
  frame->api = &api;
  XLA_FFI_Error* error = handler(frame);
  frame->api = own;
  return error;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void set_handlers(XLA_FFI_Handler* collective_execute, XLA_FFI_Handler* allreduce_q) {
  handlers[0] = collective_execute;
  handlers[1] = allreduce_q;
}

void fail_next(int32_t times) { failures = times; }

XLA_FFI_Error* collective_execute(XLA_FFI_CallFrame* frame) { return call(handlers[0], frame); }
XLA_FFI_Error* allreduce_q(XLA_FFI_CallFrame* frame) { return call(handlers[1], frame); }

cgx_status_t cgx_enqueue(const cgx_collective_t* collective) {
  // The real function fails for host memory, with and without a driver.
  if (failures.fetch_sub(1) > 0) return of_libcgx<decltype(cgx_enqueue)>("cgx_enqueue")(collective);
  failures = 0;
  if (collective->device != CGX_CUDA || collective->stream != kStream || collective->seeds)
    return CGX_INTERNAL;
  cgx_collective_t here = *collective;
  here.device = CGX_CPU;
  here.stream = nullptr;
  here.seeds = here.device_seeds;
  here.device_seeds = nullptr;
  return of_libcgx<decltype(cgx_run)>("cgx_run")(&here);
}

}  // extern "C"
#pragma GCC visibility pop
