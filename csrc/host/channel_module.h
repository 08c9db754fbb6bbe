#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_channel(pybind11::module_& m);

}  // namespace fusedrl
