// Lists of tensors, a tensor a sample, and where their memory lies. It is asked for here because a
// call of Python for each of hundreds of tensors takes longer than the arithmetic on their
// elements.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_samples(pybind11::module_& m);

}  // namespace fusedrl
