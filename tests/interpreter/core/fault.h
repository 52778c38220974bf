// An error of a kernel.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace interpreter {

struct Fault : std::runtime_error {
  int lane;  // -1: the warp as a whole

  Fault(int lane, const std::string& what) : std::runtime_error(what), lane(lane) {}
};

template <class... Parts> [[noreturn]] void fault(int lane, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Fault(lane, text.str());
}

}  // namespace interpreter
