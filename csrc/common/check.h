// Errors of ops, whose messages reach Python without file and line.
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

// The position of a token: in rows of `columns` tokens, or among packed tokens if that is 0.
inline std::string place_of(int64_t token, int64_t columns) {
  if (columns == 0) return "token " + std::to_string(token);
  return "row " + std::to_string(token / columns) + ", column " + std::to_string(token % columns);
}

}  // namespace fusedrl
