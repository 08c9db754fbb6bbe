// Leases, and the calls that compute with them, as objects of Python that an interrupt cannot
// split.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_leases(pybind11::module_& m);

}  // namespace fusedrl
