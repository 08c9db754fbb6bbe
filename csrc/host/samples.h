// Lists of tensors, a tensor a sample: columns of tensordicts, and where their memory lies. Both
// are asked for here because a call of Python for each of hundreds of tensors takes longer than the
// arithmetic on their elements.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_samples(pybind11::module_& m);

}  // namespace fusedrl
