#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_cuda(pybind11::module_& m);

}  // namespace fusedrl
