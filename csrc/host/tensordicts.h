// Access to the dictionaries of plain tensordicts: one Python call for each of hundreds of samples
// takes longer than the arithmetic on their elements.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_tensordicts(pybind11::module_& m);

}  // namespace fusedrl
