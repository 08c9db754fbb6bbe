// The dictionaries in which plain tensordicts keep their entries: a call of Python for each of
// hundreds of samples takes longer than the arithmetic on their elements.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_tensordicts(pybind11::module_& m);

}  // namespace fusedrl
