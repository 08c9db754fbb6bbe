# _C_cuda: the ops for CUDA. Compiles without a GPU and without a CUDA build of torch.
include(CheckLanguage)

set(FUSEDRL_CUDA_ARCHS_BUILT "")
if(NOT FUSEDRL_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "fusedrl: FUSEDRL_CUDA: expected auto, on or off, got '${FUSEDRL_CUDA}'; give pip the "
                      "setting, -C cmake.define.FUSEDRL_CUDA=..., which takes pypi, too")
endif()
if(FUSEDRL_CUDA STREQUAL "off")
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES "${FUSEDRL_CUDA_ARCHS}")
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FUSEDRL_CUDA STREQUAL "on")
    message(FATAL_ERROR "fusedrl: FUSEDRL_CUDA=on expected nvcc, found none; put nvcc on PATH, or use pypi, "
                        "which brings one, or auto")
  endif()
  message(STATUS "fusedrl: no nvcc, building without _C_cuda")
  return()
endif()
# Static, so that a binary of CUDA 13 also runs beside a torch of CUDA 12; `make test-cuda-build` plays it.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static CACHE STRING "The runtime of _C_cuda: Static or Shared")
enable_language(CUDA)
string(REPLACE ";" " " FUSEDRL_CUDA_ARCHS_BUILT "${FUSEDRL_CUDA_ARCHS}")

# libtorch_cuda is not here, and one symbol of it is needed (the current stream): an empty library of the
# same soname stands in for the linker, and the real one takes its place when torch is loaded.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/torch_cuda_stub.cpp
     "extern \"C\" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }\n")
add_library(torch_cuda_stub SHARED ${CMAKE_CURRENT_BINARY_DIR}/torch_cuda_stub.cpp)
set_target_properties(torch_cuda_stub PROPERTIES
  OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/stub
  CXX_VISIBILITY_PRESET default)

file(GLOB cuda_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} csrc/*/cuda.cu)
add_library(_C_cuda MODULE ${cuda_sources})
target_link_libraries(_C_cuda PRIVATE fusedrl_torch ${TORCH_CPU_LIBRARY} torch_cuda_stub)
target_compile_definitions(_C_cuda PRIVATE USE_CUDA)
target_compile_options(_C_cuda PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --extended-lambda -Xcompiler=-fvisibility=hidden>)
target_link_options(_C_cuda PRIVATE -Wl,--no-as-needed)
set_target_properties(_C_cuda PROPERTIES
  PREFIX "" SUFFIX ".abi3.so" SKIP_BUILD_RPATH ON CUDA_STANDARD 20 CUDA_VISIBILITY_PRESET hidden)
install(TARGETS _C_cuda LIBRARY DESTINATION fusedrl)
