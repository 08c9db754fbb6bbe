// Copies nested Python objects of tensors. The objects that contain the tensors are copied here,
// for a tenth of the time that Python takes; the caller clones the tensors themselves, many at a
// time. python/fusedrl/collectors/turn_data.py says which of tensordict's classes there are. Their
// attributes are named here, and tests notice if a release of tensordict changes them.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_trees(pybind11::module_& m);

}  // namespace fusedrl
