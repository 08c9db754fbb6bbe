// Bindings that need no torch: the weight channel, this CPU's level, and build information.
#include <pybind11/pybind11.h>

#include "common/cpu_level.h"
#include "host/channel_module.h"
#include "host/tensordicts.h"
#include "host/token_kl.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict facts;
  facts["version"] = FUSEDRL_VERSION;
  facts["system"] = FUSEDRL_SYSTEM;
  facts["machine"] = FUSEDRL_MACHINE;
  facts["compiler"] = FUSEDRL_COMPILER;
  facts["torch_built_against"] = FUSEDRL_TORCH_VERSION;
  facts["torch_target"] = FUSEDRL_TORCH_TARGET;
  facts["cuda_compiler"] = FUSEDRL_CUDA_COMPILER;
  facts["cuda_architectures"] = FUSEDRL_CUDA_ARCHITECTURES;
  return facts;
}

py::dict cpu_features() {
  py::dict features;
#if defined(FUSEDRL_X86_LEVELS)
  __builtin_cpu_init();
  features["avx2"] = bool(__builtin_cpu_supports("avx2"));
  features["fma"] = bool(__builtin_cpu_supports("fma"));
  features["f16c"] = bool(__builtin_cpu_supports("f16c"));
  features["avx512f"] = bool(__builtin_cpu_supports("avx512f"));
  features["avx512bw"] = bool(__builtin_cpu_supports("avx512bw"));
  features["avx512dq"] = bool(__builtin_cpu_supports("avx512dq"));
  features["avx512vl"] = bool(__builtin_cpu_supports("avx512vl"));
  features["avx512_bf16"] = bool(__builtin_cpu_supports("avx512bf16"));
#endif
  return features;
}

py::list cpu_levels() {
  py::list usable;
  for (const fusedrl::CpuLevel level : fusedrl::kCpuLevels) {
    if (level <= fusedrl::best_cpu_level()) usable.append(fusedrl::name_of(level));
  }
  return usable;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Torch-free bindings: the weight channel, CPU features, build facts.";
  m.def("build_info", &build_info, "What the binaries were built for, as a dict of strings.");
  m.def("cpu_features", &cpu_features, "Vector instruction sets of this CPU, by name.");
  m.def(
      "cpu_level", [] { return fusedrl::name_of(fusedrl::chosen_cpu_level()); },
      "The level that the CPU kernels run at; RuntimeError if FUSEDRL_CPU_LEVEL is not usable.");
  m.def("cpu_levels", &cpu_levels,
        "The levels that this CPU has the instructions for, the best one last.");
  fusedrl::bind_tensordicts(m);
  fusedrl::bind_token_kl(m);
#if defined(FUSEDRL_CHANNEL)
  fusedrl::bind_channel(m);
#endif
}
