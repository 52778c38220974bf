// Translates statements into instructions: names become register slots, and calls are inlined.
#include <algorithm>

#include "program.h"
#include "text.h"
#include "translator.h"

namespace interpreter {

uint32_t Translator::add_slots(bool wide) {
  const uint32_t slot = kernel_.slots;
  kernel_.slots += wide ? 2 : 1;
  return slot;
}

uint32_t Translator::constant(uint64_t value, bool wide) {
  const auto [entry, added] = constants_.try_emplace({value, wide}, 0);
  if (added) {
    entry->second = add_slots(wide);
    kernel_.constants.push_back({value, entry->second, wide});
  }
  return entry->second;
}

uint32_t Translator::special(const std::string& name, bool wide) {
  const auto [entry, added] = specials_.try_emplace(name, 0);
  if (added) {
    entry->second = add_slots(wide);
    kernel_.specials.push_back({name, entry->second});
  }
  return entry->second;
}

static RegisterClass register_class(Type type) {
  if (type == Type::pred) return RegisterClass::predicate;
  if (bytes(type) > 8) throw Unsupported("registers of 128 bits");
  return bytes(type) == 8 ? RegisterClass::b64 : bytes(type) == 4 ? RegisterClass::b32 : RegisterClass::b16;
}

Symbol* Translator::find(const std::string& name) {
  for (size_t i = scopes_.size(); i-- > 0;) {
    Scope& scope = scopes_[i];
    if (const auto found = scope.symbols.find(name); found != scope.symbols.end()) return &found->second;
    // %r<18> declares %r0 to %r17
    const size_t digits = name.find_last_not_of("0123456789") + 1;
    if (const auto range = scope.ranges.find(name.substr(0, digits));
        digits < name.size() && range != scope.ranges.end()) {
      Symbol symbol;
      symbol.is_register = true;
      symbol.reg = {add_slots(range->second == RegisterClass::b64), range->second};
      return &(scope.symbols[name] = symbol);
    }
    if (scope.function) break;  // a function does not see its caller's names
  }
  if (const auto shared = kernel_.module->shared.find(name); shared != kernel_.module->shared.end()) {
    scopes_[0].symbols[name] = shared_variable(shared->second);
    return &scopes_[0].symbols[name];
  }
  const auto outer = scopes_[0].symbols.find(name);
  return outer == scopes_[0].symbols.end() ? nullptr : &outer->second;
}

Symbol Translator::shared_variable(const std::string& text) {
  const Declaration d = parse_declaration(text);
  Symbol symbol;
  symbol.space = Space::shared;
  if (d.external) {
    kernel_.dynamic_align = std::max(kernel_.dynamic_align, d.align);
    symbol.special = "dynamic_shared";
  } else {
    symbol.value = place(kernel_.static_shared, d.align, d.bytes());
  }
  return symbol;
}

uint32_t Translator::place(uint32_t& end, uint32_t align, uint64_t bytes) {
  const uint32_t at = (end + align - 1) / align * align;
  end = at + bytes;
  return at;
}

Symbol Translator::per_lane(const std::string& text) {
  const Declaration d = parse_declaration(text);
  Symbol symbol;
  symbol.space = Space::local;
  symbol.value = place(kernel_.local_bytes, d.align, d.bytes());
  return symbol;
}

void Translator::declare(const std::string& text) {
  const std::string kind = text.substr(0, text.find_first_of(" \t\n"));
  Scope& scope = scopes_.back();
  if (kind == ".reg") {
    const std::string rest = trim(text.substr(4));
    const size_t end = rest.find_first_of(" \t\n");
    const RegisterClass of = register_class(parse_type(rest.substr(1, end - 1)));
    for (const std::string& name : split(rest.substr(end))) {
      if (const size_t range = name.find('<'); range != std::string::npos) {
        scope.ranges[name.substr(0, range)] = of;
      } else {
        Symbol symbol;
        symbol.is_register = true;
        symbol.reg = {add_slots(of == RegisterClass::b64), of};
        scope.symbols[name] = symbol;
      }
    }
  } else if (kind == ".shared") {
    scope.symbols[parse_declaration(text).name] = shared_variable(text);
  } else if (kind == ".local" || kind == ".param") {
    scope.symbols[parse_declaration(text).name] = per_lane(text);
  } else if (kind == ".branchtargets") {
    branch_targets_[last_label_] = split(text.substr(kind.size()));
  }
}

void Translator::translate(const Function& entry) {
  Scope outer;
  kernel_.carry = add_slots(false);
  for (const std::string& text : entry.params) {
    const Declaration d = parse_declaration(text);
    Symbol symbol;
    symbol.space = Space::param;
    symbol.value = place(kernel_.param_bytes, d.align, d.bytes());
    kernel_.params.push_back(symbol.value);
    kernel_.param_sizes.push_back(d.bytes());
    outer.symbols[d.name] = symbol;
  }
  scopes_.push_back(outer);
  walk(entry);
  make_end();
  for (const Branch& b : branches_)
    (b.table < 0 ? kernel_.code[b.at].target : kernel_.branch_tables[b.table][b.entry]) = find_label(b.scopes, b.label);
}

void Translator::walk(const Function& f) {
  for (const Item& item : f.body) {
    if (item.kind == Item::open) {
      scopes_.emplace_back();
      scopes_.back().id = ++last_scope_;
    } else if (item.kind == Item::close) {
      scopes_.pop_back();
    } else if (item.kind == Item::label) {
      last_label_ = item.text;
      labels_[{scopes_.back().id, item.text}] = kernel_.code.size();
    } else if (item.kind == Item::declaration) {
      declare(item.text);
    } else if (item.statement_.opcode == "call") {
      call(item.statement_);
    } else {
      instruction(item.statement_);
    }
  }
}

Instruction& Translator::add(const Statement& statement) {
  Instruction& out = kernel_.code.emplace_back();
  out.statement = kernel_.statements.size();
  out.kind = kind_of(statement.opcode);
  kernel_.statements.push_back(statement);
  if (!statement.guard.empty()) {
    const Symbol* guard = find(statement.guard);
    if (!guard || !guard->is_register) throw Unsupported("guard " + statement.guard);
    out.guarded = true;
    out.guard = guard->reg.slot;
    out.guard_negated = statement.guard_negated;
  }
  return out;
}

void Translator::instruction(const Statement& statement) {
  Instruction& out = add(statement);
  const Instruction before = out;
  try {
    const auto decoder = table().find(statement.opcode);
    if (decoder == table().end()) throw Unsupported("unknown opcode");
    Decoding decoding(*this, statement, out);
    decoder->second(decoding);
    decoding.finish();
  } catch (const Unsupported& error) {
    out = before;
    make_illegal(out);
    kernel_.statements.back().problem = error.what();
  }
}

std::vector<int> Translator::scope_ids() const {
  std::vector<int> ids;
  for (size_t i = scopes_.size(); i-- > 0;) {
    ids.push_back(scopes_[i].id);
    if (scopes_[i].function) break;
  }
  return ids;
}

void Translator::branch_to(const std::string& label) {
  branches_.push_back({kernel_.code.size() - 1, -1, 0, scope_ids(), label});
}

uint32_t Translator::branch_table(const std::string& label) {
  const std::vector<std::string>& targets = branch_targets_.at(label);
  const uint32_t table = kernel_.branch_tables.size();
  kernel_.branch_tables.emplace_back(targets.size());
  for (size_t entry = 0; entry < targets.size(); entry++)
    branches_.push_back({0, int(table), int(entry), scope_ids(), targets[entry]});
  return table;
}

// For bodies that do not end with ret.
void Translator::make_end() {
  Statement statement;
  statement.opcode = "exit";
  statement.text = "the end of the kernel";
  instruction(statement);
}

uint32_t Translator::find_label(const std::vector<int>& scopes, const std::string& label) const {
  for (int scope : scopes)
    if (const auto found = labels_.find({scope, label}); found != labels_.end()) return found->second;
  throw Unsupported("label " + label);
}

// --------------------------------------------------------------------------------------------------------- Decoding

Decoding::Decoding(Translator& translator, const Statement& statement, Instruction& out)
    : out(out), translator_(translator), statement_(statement), taken_(statement.modifiers.size()) {}

bool Decoding::take(const char* modifier) { return take_one_of({modifier}) == 0; }

int Decoding::take_one_of(std::initializer_list<const char*> modifiers) {
  for (size_t i = 0; i < taken_.size(); i++) {
    if (taken_[i]) continue;
    int index = 0;
    for (const char* modifier : modifiers) {
      if (statement_.modifiers[i] == modifier) {
        taken_[i] = true;
        return index;
      }
      index++;
    }
  }
  return -1;
}

std::string Decoding::take_prefixed(const std::string& prefix) {
  for (size_t i = 0; i < taken_.size(); i++) {
    if (taken_[i] || statement_.modifiers[i].rfind(prefix, 0) != 0) continue;
    taken_[i] = true;
    return statement_.modifiers[i];
  }
  return "";
}

Type Decoding::take_type() {
  for (size_t i = 0; i < taken_.size(); i++) {
    if (taken_[i]) continue;
    const Type type = parse_type(statement_.modifiers[i]);
    if (type == Type::none) continue;
    taken_[i] = true;
    return type;
  }
  return Type::none;
}

void Decoding::finish() const {
  for (size_t i = 0; i < taken_.size(); i++)
    if (!taken_[i]) fail("unknown modifier ." + statement_.modifiers[i]);
}

void Decoding::fail(const std::string& why) const { throw Unsupported("unsupported: " + why); }

const std::string& Decoding::operand(size_t i) const {
  if (i >= statement_.operands.size()) fail("too few operands");
  return statement_.operands[i];
}

std::vector<std::string> Decoding::elements(size_t i) const {
  const std::string& text = operand(i);
  if (text[0] != '{') return {text};
  return split(text.substr(1, text.rfind('}') - 1));
}

static bool wide_special(const std::string& name) { return name == "%clock64" || name == "%globaltimer"; }

static bool is_special(const std::string& name) {
  static const char* names[] = {"%tid.",
                                "%ntid.",
                                "%ctaid.",
                                "%nctaid.",
                                "%laneid",
                                "%warpid",
                                "%nwarpid",
                                "%lanemask_",
                                "%clock",
                                "%globaltimer",
                                "%smid",
                                "%nsmid",
                                "%dynamic_smem_size",
                                "%total_smem_size",
                                "%envreg",
                                "%gridid"};
  return std::any_of(std::begin(names), std::end(names), [&](const char* n) { return name.rfind(n, 0) == 0; });
}

bool Decoding::is_register(const std::string& text) const {
  const Symbol* symbol = translator_.find(text);
  return symbol && symbol->is_register;
}

Register Decoding::register_of(const std::string& text) {
  if (text == "_") return {translator_.add_slots(true), RegisterClass::b64};
  const Symbol* symbol = translator_.find(text);
  if (!symbol || !symbol->is_register) fail("operand " + text);
  return symbol->reg;
}

Register Decoding::destination(const std::string& text) { return register_of(text); }

uint32_t Decoding::source(const std::string& text, Type type) {
  const bool wide = bytes(type) == 8;
  if (type == Type::pred) {
    if (is_number(text)) return translator_.constant(parse_number(text) ? kAllLanes : 0, false);
    const Register r = register_of(text);
    if (r.kind != RegisterClass::predicate) fail("operand " + text + " is no predicate");
    return r.slot;
  }
  if (is_number(text)) {
    uint64_t value = parse_number(text);
    if (bytes(type) == 4) value = uint32_t(value);
    if (bytes(type) == 2) value = uint16_t(value);
    if (bytes(type) == 1) value = uint8_t(value);
    return translator_.constant(value, wide);
  }
  if (text == "WARP_SZ") return translator_.constant(kLanes, wide);
  if (is_special(text)) {
    if (wide != wide_special(text)) fail("operand " + text + " of another width");
    return translator_.special(text, wide);
  }
  if (const Symbol* symbol = translator_.find(text)) {
    if (symbol->is_register) {
      if (symbol->reg.kind == RegisterClass::predicate || (symbol->reg.kind == RegisterClass::b64) != wide)
        fail("operand " + text + " of another width");
      return symbol->reg.slot;
    }
    if (!symbol->special.empty()) return translator_.special(symbol->special + (wide ? "64" : ""), wide);
    return translator_.constant(symbol->value, wide);
  }
  const auto& globals = translator_.module().globals;
  if (const auto found = globals.find(text); found != globals.end())
    return translator_.constant(reinterpret_cast<uint64_t>(found->second->bytes.data()), true);
  const Module& module = translator_.module();
  if (module.functions.count(text)) return translator_.constant(module.address_of(text), true);
  fail("operand " + text);
}

int64_t Decoding::immediate(const std::string& text) const {
  if (!is_number(text)) fail("operand " + text + ", wanted a number");
  return parse_number(text);
}

void Decoding::write(size_t operand, Type type) { write_text(this->operand(operand), type); }

void Decoding::write_text(const std::string& text, Type type) {
  const Register r = destination(text);
  const bool predicate = r.kind == RegisterClass::predicate, wide = r.kind == RegisterClass::b64;
  if (text != "_" && (predicate != (type == Type::pred) || wide != (bytes(type) == 8)))
    fail("operand " + text + " of another width");
  out.dst[out.dsts++] = r.slot;
}

void Decoding::read_predicate(size_t operand, bool& negated) {
  std::string text = this->operand(operand);
  negated = text[0] == '!';
  if (negated) text = trim(text.substr(1));
  read_text(text, Type::pred);
}

void Decoding::read_address(size_t operand) {
  const std::string& text = this->operand(operand);
  if (text[0] != '[') fail("operand " + text + ", wanted an address");
  std::string base = trim(text.substr(1, text.rfind(']') - 1));
  if (const size_t plus = base.find('+'); plus != std::string::npos) {
    out.offset = int64_t(parse_number(trim(base.substr(plus + 1))));
    base = trim(base.substr(0, plus));
  }
  const Symbol* symbol = translator_.find(base);
  if (out.space == Space::param && (translator_.in_call() || (symbol && symbol->space == Space::local)))
    out.space = Space::local;
  const bool reg = symbol && symbol->is_register;
  out.wide = reg ? symbol->reg.kind == RegisterClass::b64 : true;
  read_text(base, out.wide ? Type::b64 : Type::b32);
}

const Table& table() {
  static const Table all = [] {
    Table t;
    add_arithmetic(t);
    add_bits(t);
    add_comparisons(t);
    add_conversions(t);
    add_memory(t);
    add_async(t);
    add_mbarriers(t);
    add_wmma(t);
    add_warp(t);
    add_matrix(t);
    return t;
  }();
  return all;
}

static std::vector<std::string>& kind_names() {
  static std::vector<std::string> names;
  return names;
}

uint32_t kind_of(const std::string& name) {
  std::vector<std::string>& names = kind_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return found - names.begin();
  names.push_back(name);
  return names.size() - 1;
}

const std::vector<std::string>& kinds() { return kind_names(); }

const Kernel& Module::kernel(const std::string& name) {
  std::unique_ptr<Kernel>& kernel = kernels[name];
  if (!kernel) {
    const auto found = functions.find(name);
    if (found == functions.end() || !found->second.entry) throw Unsupported("no kernel " + name);
    auto made = std::make_unique<Kernel>();
    made->name = name;
    made->module = this;
    made->max_threads = found->second.max_threads;
    Translator(*made).translate(found->second);
    kernel = std::move(made);
  }
  return *kernel;
}

}  // namespace interpreter
