# Sources of the kernels and the options of each: sets CGX_KERNEL_SOURCES. Included by
# cgx_ops/csrc/CMakeLists.txt, because source properties apply only in the directory that sets them.
# Targets must give the same bits, so they use no FMA contraction and no fast-math. -fno-trapping-math
# does not change results: it lets the compiler evaluate both sides of a condition, as SIMD needs.

set(CGX_KERNEL_DIR ${CMAKE_CURRENT_LIST_DIR})
set(CGX_KERNEL_SOURCES ${CGX_KERNEL_DIR}/dispatch.cc)

# With sanitizers, the kernels take minutes to compile at -O3, and GCC 12's pass esra fails on them
# with ThreadSanitizer.
set(CGX_KERNEL_OPTIMIZATION -O3)
if(CGX_SANITIZE)
  set(CGX_KERNEL_OPTIMIZATION "-O1;$<$<CXX_COMPILER_ID:GNU>:-fno-tree-sra>")
endif()

function(cgx_cpu_target name)
  set(source ${CGX_KERNEL_DIR}/cpu/kernels_${name}.cc)
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${CGX_KERNEL_OPTIMIZATION};-ffp-contract=off;-fno-trapping-math;${ARGN}")
  set(CGX_KERNEL_SOURCES ${CGX_KERNEL_SOURCES} ${source} PARENT_SCOPE)
endfunction()

cgx_cpu_target(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  cgx_cpu_target(avx2 -mavx2)
  cgx_cpu_target(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mbmi2 -mprefer-vector-width=512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  cgx_cpu_target(neon)
endif()
