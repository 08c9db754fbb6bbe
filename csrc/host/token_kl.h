// token_kl of columns on the CPU, in one call from Python: reading each tensor, allocating and
// calling the kernel from Python would take longer than thousands of tokens.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_token_kl(pybind11::module_& m);

}  // namespace fusedrl
