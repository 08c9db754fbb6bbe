// Errors of ops. Python sees the message as it is given here, without a file or line of the
// sources.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fusedrl {

template <typename... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Where a token is: in its row of `columns` tokens, or among packed ones where that is 0.
inline std::string place_of(int64_t token, int64_t columns) {
  if (columns == 0) return "token " + std::to_string(token);
  return "row " + std::to_string(token / columns) + ", column " + std::to_string(token % columns);
}

}  // namespace fusedrl
