// Errors of ops. Python sees the message as it stands here, without a place in these sources.
#pragma once

#include <sstream>
#include <stdexcept>

namespace fusedrl {

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace fusedrl
