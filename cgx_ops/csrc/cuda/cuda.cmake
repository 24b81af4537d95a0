# What of libcgx.so needs the CUDA toolkit: sets CGX_CUDA_SOURCES and the flags
# of nvcc. Included by cgx_ops/csrc/CMakeLists.txt. Without CGX_NVCC: absent.cc, which says so.
#
# The runtime is linked in (CUDA_RUNTIME_LIBRARY's default, Static) and finds the driver at its
# first call, so that one libcgx.so also loads on machines that have none.

if(NOT CGX_NVCC)
  set(CGX_CUDA_SOURCES ${CMAKE_CURRENT_LIST_DIR}/absent.cc)
  return()
endif()

# Ampere's and Hopper's own code; what comes later compiles the last one's PTX when it is loaded.
set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
set(CMAKE_CUDA_COMPILER ${CGX_NVCC})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)

# Device code spells its arithmetic out (kernel/cuda/arithmetic.h): no flag is needed for its bits.
set(flags -Xcompiler=-Wall,-Wextra,-ffp-contract=off)
if(CGX_WERROR)
  list(APPEND flags --Werror=all-warnings -Xcompiler=-Werror)
endif()
# A quarter of the bytes. Every driver of CUDA 13 unpacks it; those before may not.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  list(APPEND flags --compress-mode=size)
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")

# Only these files include the runtime's headers. The flags of all others are those of a build
# without CUDA, so that their objects serve both.
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
list(FILTER sources EXCLUDE REGEX "/absent\\.cc$")
list(TRANSFORM CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES PREPEND -isystem OUTPUT_VARIABLE includes)
set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${includes}")

file(GLOB CGX_CUDA_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/../kernel/cuda/*.cu)
list(APPEND CGX_CUDA_SOURCES ${sources})
