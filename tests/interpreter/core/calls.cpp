// Calls: the callee's body is inlined. Also printf.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "machine.h"
#include "text.h"
#include "translator.h"

namespace interpreter {

Flow branch(Warp& w, const Instruction& i, Mask lanes);
Flow branch_to_each(Warp& w, Mask lanes, const uint32_t* targets);

namespace {

// A call through a pointer: a branch to one of the inlined bodies.
Flow call_pointer(Warp& w, const Instruction& i, Mask lanes) {
  w.need(i.src[0], lanes, "the function that is called");
  const std::vector<uint32_t>& bodies = w.block->kernel.branch_tables[i.option];
  uint32_t targets[kLanes];
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const uint64_t pointer = w.cells<uint64_t>(i.src[0])[l], number = Module::function_number(pointer);
    if (number >= bodies.size()) fault(l, "a call of ", pointer, ", which is no function");
    targets[l] = bodies[number];
  }
  return branch_to_each(w, lanes, targets);
}

Flow call_other(Warp&, const Instruction&, Mask lanes) {
  fault(std::countr_zero(lanes), "a call of a function that has no body, takes other arguments, or is being executed");
}

// ------------------------------------------------------------------------------------------------------------ printf

// A string in global or local memory.
std::string text_at(Warp& w, int lane, uint64_t pointer) {
  const uint64_t local = window(w, Space::local, lane), end = local + w.block->kernel.local_bytes;
  if (pointer >= local && pointer < end) {
    const char* text = reinterpret_cast<const char*>(pointer);
    return std::string(text, strnlen(text, end - pointer));
  }
  std::string text;
  while (true) {
    w.block->launch.memory.check(w, lane, pointer, 1, Access::read);
    const char c = *reinterpret_cast<const char*>(GlobalMemory::untagged(pointer++));
    if (!c) return text;
    text += c;
  }
}

// The arguments of printf, in local memory, each aligned to its size.
class Arguments {
 public:
  Arguments(Warp& w, int lane, uint64_t pointer) : at_(pointer - window(w, Space::local, lane)) {
    const uint32_t size = w.block->kernel.local_bytes;
    memory_.assign(&w.local[uint64_t(lane) * size], &w.local[uint64_t(lane) * size] + size);
  }
  template <class T> T take() {
    at_ = (at_ + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    T value{};
    if (at_ + sizeof(T) <= memory_.size()) std::memcpy(&value, &memory_[at_], sizeof(T));
    at_ += sizeof(T);
    return value;
  }

 private:
  std::vector<uint8_t> memory_;
  uint64_t at_;
};

template <class T> std::string formatted(const std::string& specification, T value) {
  char text[512];
  std::snprintf(text, sizeof(text), specification.c_str(), value);
  return text;
}

std::string printed(Warp& w, int lane, const std::string& format, uint64_t pointer) {
  Arguments arguments(w, lane, pointer);
  std::string text;
  for (size_t at = 0; at < format.size(); at++) {
    if (format[at] != '%') {
      text += format[at];
      continue;
    }
    const size_t end = std::min(format.find_first_of("diouxXfFeEgGaAcsp%", at + 1), format.size() - 1);
    const std::string specification = format.substr(at, end + 1 - at);
    const char kind = format[end];
    const bool wide = specification.find('l') != std::string::npos;
    if (kind == '%')
      text += '%';
    else if (kind == 's')
      text += formatted(specification, text_at(w, lane, arguments.take<uint64_t>()).c_str());
    else if (kind == 'p')
      text += formatted(specification, reinterpret_cast<void*>(GlobalMemory::untagged(arguments.take<uint64_t>())));
    else if (std::strchr("fFeEgGaA", kind))
      text += formatted(specification, arguments.take<double>());
    else if (wide)
      text += formatted(specification, arguments.take<int64_t>());
    else
      text += formatted(specification, arguments.take<int32_t>());
    at = end;
  }
  return text;
}

// vprintf(format, arguments): src[0] and src[1] are the offsets of these pointers in local memory, src[2] that of the
// result.
Flow print(Warp& w, const Instruction& i, Mask lanes) {
  const uint64_t size = w.block->kernel.local_bytes;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const auto at = [&](int source) { return &w.local[l * size + w.cells<uint64_t>(i.src[source])[l]]; };
    uint64_t format, arguments;
    std::memcpy(&format, at(0), sizeof(format));
    std::memcpy(&arguments, at(1), sizeof(arguments));
    const std::string text = printed(w, l, text_at(w, l, format), arguments);
    std::fwrite(text.data(), 1, text.size(), stdout);
    if (i.srcs < 3) continue;
    const int32_t count = text.size();
    std::memcpy(at(2), &count, sizeof(count));
    std::memset(&w.local_known[at(2) - w.local.data()], 0xff, sizeof(count));
  }
  std::fflush(stdout);
  return Flow::next;
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- translated

void Translator::call_nothing(const Statement& statement, const std::string& why) {
  make_illegal(add(statement));
  kernel_.statements.back().problem = why;
}

void Translator::call(const Statement& statement) {
  std::vector<std::string> results, arguments;
  std::string callee;
  for (const std::string& operand : statement.operands) {
    if (operand[0] == '(')
      (callee.empty() ? results : arguments) = split(operand.substr(1, operand.size() - 2));
    else if (callee.empty())
      callee = operand;
  }
  const Symbol* pointer = find(callee);
  const auto found = kernel_.module->functions.find(callee);
  if (!statement.guard.empty()) return call_nothing(statement, "a call under a predicate");
  if (pointer && pointer->is_register && pointer->reg.kind == RegisterClass::b64)
    return call_by_pointer(statement, pointer->reg.slot, results, arguments);
  if (callee == "vprintf") return call_printf(statement, results, arguments);
  if (callee == "__assertfail") return call_nothing(statement, "an assertion failed");
  if (found == kernel_.module->functions.end() || !found->second.defined)
    return call_nothing(statement, "a call of a function without a body: " + callee);
  if (is_calling(found->second)) return call_nothing(statement, "a recursive call");
  inline_body(found->second, results, arguments);
}

bool Translator::is_calling(const Function& f) const {
  return std::find(calling_.begin(), calling_.end(), &f) != calling_.end();
}

void Translator::inline_body(const Function& callee, const std::vector<std::string>& results,
                             const std::vector<std::string>& arguments) {
  Scope scope;
  scope.function = true;
  scope.id = ++last_scope_;
  const auto bind = [&](const std::vector<std::string>& formal, const std::vector<std::string>& actual) {
    for (size_t i = 0; i < formal.size(); i++)
      if (const Symbol* symbol = find(actual.at(i))) scope.symbols[parse_declaration(formal[i]).name] = *symbol;
  };
  bind(callee.params, arguments);
  bind(callee.results, results);
  calling_.push_back(&callee);
  scopes_.push_back(scope);
  walk(callee);
  labels_[{scope.id, "return"}] = kernel_.code.size();
  scopes_.pop_back();
  calling_.pop_back();
}

// Inlines the body of every function with as many parameters and results; each is followed by a jump to the end.
void Translator::call_by_pointer(const Statement& statement, uint32_t pointer, const std::vector<std::string>& results,
                                 const std::vector<std::string>& arguments) {
  const std::map<std::string, Function>& functions = kernel_.module->functions;
  const uint32_t table = kernel_.branch_tables.size();
  Instruction& out = add(statement);
  out.execute = call_pointer;
  out.src[out.srcs++] = pointer;
  out.option = table;
  kernel_.branch_tables.emplace_back(functions.size(), uint32_t(kernel_.code.size()));
  add(statement).execute = call_other;
  scopes_.emplace_back();
  scopes_.back().id = ++last_scope_;
  size_t number = 0;
  for (const auto& [name, f] : functions) {
    const size_t entry = number++;
    if (f.entry || !f.defined || is_calling(f)) continue;
    if (f.params.size() != arguments.size() || f.results.size() != results.size()) continue;
    kernel_.branch_tables[table][entry] = kernel_.code.size();
    inline_body(f, results, arguments);
    Instruction& jump = add(statement);
    jump.execute = branch;
    branch_to("$behind");
  }
  labels_[{scopes_.back().id, "$behind"}] = kernel_.code.size();
  scopes_.pop_back();
}

void Translator::call_printf(const Statement& statement, const std::vector<std::string>& results,
                             const std::vector<std::string>& arguments) {
  std::vector<uint32_t> places;
  for (const auto* names : {&arguments, &results})
    for (const std::string& name : *names) {
      const Symbol* symbol = find(name);
      if (!symbol || symbol->space != Space::local)
        return call_nothing(statement, "a call of printf without variables");
      places.push_back(constant(symbol->value, true));
    }
  Instruction& out = add(statement);
  out.execute = print;
  for (uint32_t place : places) out.src[out.srcs++] = place;
}

}  // namespace interpreter
