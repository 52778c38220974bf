// The translation of a kernel: from names to registers and addresses.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "program.h"

namespace interpreter {

// The meaning of a name: a register, or the address of a variable in its space.
struct Symbol {
  bool is_register = false;
  Register reg{};
  Space space = Space::generic;
  uint64_t value = 0;
  std::string special;  // the special register it stands for, if any
};

struct Scope {
  int id = 0;
  bool function = false;
  std::unordered_map<std::string, Symbol> symbols;
  std::unordered_map<std::string, RegisterClass> ranges;
};

class Translator {
 public:
  explicit Translator(Kernel& kernel) : kernel_(kernel) {}
  void translate(const Function& entry);

  Kernel& kernel() { return kernel_; }
  const Module& module() const { return *kernel_.module; }
  uint32_t add_slots(bool wide);
  uint32_t constant(uint64_t value, bool wide);
  uint32_t special(const std::string& name, bool wide);
  Symbol* find(const std::string& name);
  bool in_call() const { return !calling_.empty(); }
  // Makes the last instruction branch to a label.
  void branch_to(const std::string& label);
  // The index of a brx's table in Kernel::branch_tables.
  uint32_t branch_table(const std::string& label);

 private:
  struct Branch {
    size_t at;  // in the code; if table is not -1, the branch is an entry of that table
    int table, entry;
    std::vector<int> scopes;
    std::string label;
  };

  void walk(const Function&);
  void declare(const std::string& text);
  Instruction& add(const Statement&);
  void instruction(const Statement&);
  void call(const Statement&);
  void call_nothing(const Statement&, const std::string& why);
  void call_by_pointer(const Statement&, uint32_t pointer, const std::vector<std::string>& results,
                       const std::vector<std::string>& arguments);
  void call_printf(const Statement&, const std::vector<std::string>& results,
                   const std::vector<std::string>& arguments);
  void inline_body(const Function&, const std::vector<std::string>& results, const std::vector<std::string>& arguments);
  bool is_calling(const Function&) const;
  void make_end();
  Symbol shared_variable(const std::string& text);
  Symbol per_lane(const std::string& text);
  static uint32_t place(uint32_t& end, uint32_t align, uint64_t bytes);
  std::vector<int> scope_ids() const;
  uint32_t find_label(const std::vector<int>& scopes, const std::string& label) const;

  Kernel& kernel_;
  std::vector<Scope> scopes_;
  int last_scope_ = 0;
  std::string last_label_;
  std::map<std::pair<int, std::string>, uint32_t> labels_;
  std::vector<Branch> branches_;
  std::map<std::string, std::vector<std::string>> branch_targets_;
  std::map<std::pair<uint64_t, bool>, uint32_t> constants_;
  std::map<std::string, uint32_t> specials_;
  std::vector<const Function*> calling_;
};

// Makes an instruction that faults when a lane executes it.
void make_illegal(Instruction& out);

}  // namespace interpreter
