# The sources of libcgx.so that need the CUDA toolkit, and the flags of nvcc: sets CGX_CUDA_SOURCES.
# Included by cgx_ops/csrc/CMakeLists.txt. Without CGX_NVCC it uses absent.cc, which reports errors.
#
# The runtime is linked statically (the default of CUDA_RUNTIME_LIBRARY) and looks up the driver on
# first use, so libcgx.so also loads on machines without a driver.

if(NOT CGX_NVCC)
  set(CGX_CUDA_SOURCES ${CMAKE_CURRENT_LIST_DIR}/absent.cc)
  return()
endif()

# Binaries for Ampere and Hopper. Later GPUs compile Hopper's PTX when they load it.
set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
set(CMAKE_CUDA_COMPILER ${CGX_NVCC})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)

# Device code uses explicit rounding intrinsics (kernel/cuda/arithmetic.h), so it needs no flags.
set(flags -Xcompiler=-Wall,-Wextra,-ffp-contract=off)
if(CGX_WERROR)
  list(APPEND flags --Werror=all-warnings -Xcompiler=-Werror)
endif()
# Compresses to a quarter of the size. All drivers of CUDA 13 support it, older ones may not.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  list(APPEND flags --compress-mode=size)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")

# Only these files include the runtime's headers. All others have the flags of a build without CUDA,
# so that both builds can share their objects.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
list(FILTER sources EXCLUDE REGEX "/absent\\.cc$")
list(TRANSFORM CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES PREPEND -isystem OUTPUT_VARIABLE includes)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${includes}")

file(GLOB CGX_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../kernel/cuda/*.cu
  ${CMAKE_CURRENT_LIST_DIR}/../kernel/cuda/aligned/*.cu)
list(APPEND CGX_CUDA_SOURCES ${sources})
