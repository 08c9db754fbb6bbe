// token_kl of columns on the CPU, in one call from Python: to ask each tensor for its memory, to
// allocate, and to call the kernel from there would take longer than thousands of tokens.
#pragma once

#include <pybind11/pybind11.h>

namespace fusedrl {

void bind_token_kl(pybind11::module_& m);

}  // namespace fusedrl
