// What is said of a token that no class of the head has.
#pragma once

#include "common/check.h"

namespace fusedrl {

// An id below 0 stands for no token, as padding does; one behind the last is of another tokenizer.
inline void refuse_class(int64_t target, int64_t classes, int64_t token, int64_t columns) {
  check(false, "tokens: expected values in [0, ", classes, "), got ", target, " at ",
        place_of(token, columns), "; leave it out with mask",
        target < 0 ? "" : ", or make the tokens with the tokenizer of this model");
}

}  // namespace fusedrl
