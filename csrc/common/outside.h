// The error for a token outside the classes of the head.
#pragma once

#include "common/check.h"

namespace fusedrl {

// A negative id is padding; one beyond the vocabulary comes from another tokenizer.
inline void refuse_class(int64_t target, int64_t classes, int64_t token, int64_t columns) {
  check(false, "tokens: expected values in [0, ", classes, "), got ", target, " at ",
        place_of(token, columns), "; leave it out with mask",
        target < 0 ? "" : ", or make the tokens with the tokenizer of this model");
}

}  // namespace fusedrl
