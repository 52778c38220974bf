// Pieces of PTX text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "numbers.h"

namespace interpreter {

std::string trim(const std::string& text);
// Splits at commas outside of brackets.
std::vector<std::string> split(const std::string& text);
Type parse_type(const std::string& name);
bool is_number(const std::string& text);
uint64_t parse_number(const std::string& text);

// A variable: .shared .align 16 .b8 name[64]
struct Declaration {
  std::string name;
  uint32_t align = 1, element = 1;
  uint64_t count = 1;
  bool array = false, external = false;

  uint64_t bytes() const { return count * element; }
};
Declaration parse_declaration(const std::string& text);

}  // namespace interpreter
