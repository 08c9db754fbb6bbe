// Copies of nested Python objects of tensors. What holds the tensors is copied here, where an
// object costs a tenth of what it costs in Python; the tensors themselves are cloned by the caller,
// many at a time. Which classes there are, and which attributes their objects have, is tensordict's
// affair: python/fusedrl/collectors/trees.py says it, and its tests notice where a release
// changes it.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_trees(pybind11::module_& m);

}  // namespace fusedrl
