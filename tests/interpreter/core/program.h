// PTX as text, and as what the machine executes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "numbers.h"
#include "ordering.h"

namespace interpreter {

using Mask = uint32_t;  // a bit for each lane of a warp
constexpr int kLanes = 32;
constexpr Mask kAllLanes = ~Mask(0);

struct Warp;
struct Instruction;

// What a path does after an instruction.
enum class Flow : uint8_t { next, jump, wait };
using Handler = Flow (*)(Warp&, const Instruction&, Mask);

enum class Space : uint8_t { generic, global, shared, param, local };
constexpr const char* kSpaces[] = {"generic", "global", "shared", "param", "local"};
// Which lanes must execute an instruction together.
enum class Together : uint8_t { no, members, live };

struct Location {
  uint32_t file = 0, line = 0;
  uint32_t inlined_file = 0, inlined_line = 0;  // the call, if the line is of an inlined function; else 0
};

struct Instruction {
  Handler execute = nullptr;
  // Registers, by their first slot.
  uint32_t dst[8], src[24];
  uint8_t dsts = 0, srcs = 0;
  bool guarded = false, guard_negated = false;
  uint32_t guard = 0;
  Together together = Together::no;
  uint32_t members = 0;  // the register with the mask of lanes, for Together::members
  // The meaning of these depends on the instruction.
  Space space = Space::generic;
  Type type = Type::none;
  uint8_t size = 0, count = 1;
  bool wide = false, negated = false, atomic = false;
  MemoryScope release = MemoryScope::none;
  uint32_t option = 0;
  int64_t offset = 0;
  uint32_t target = 0;

  uint32_t csr = 0;        // rounding and flushing of floats; 0: the default
  uint32_t kind = 0;       // index in kinds(), for counts
  uint32_t statement = 0;  // index in Kernel::statements
};

struct Statement {
  std::string opcode;
  std::vector<std::string> modifiers, operands;
  std::string guard;
  bool guard_negated = false;
  uint32_t line = 0;
  Location location;
  std::string text;
  std::string problem;  // why it cannot be executed, or ""
};

// A special register that the kernel reads.
struct Special {
  std::string name;
  uint32_t slot;
};

struct Constant {
  uint64_t value;
  uint32_t slot;
  bool wide;
};

struct Module;

struct Kernel {
  std::string name;
  const Module* module = nullptr;
  std::vector<Statement> statements;
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<Special> specials;
  uint32_t slots = 0;
  uint32_t param_bytes = 0, static_shared = 0, dynamic_align = 16, local_bytes = 0;
  uint32_t max_threads = 1024;
  uint32_t carry = 0;  // the register of carry bits
  uint32_t cell = 4;   // size of the narrowest access to shared memory, in bytes

  std::vector<std::vector<uint32_t>> branch_tables;

  std::vector<uint32_t> params;  // offset of each
  std::vector<uint32_t> param_sizes;
};

// One item of a function's body, in order.
struct Item {
  enum Kind { statement, label, declaration, open, close } kind;
  Statement statement_;
  std::string text;
};

struct Function {
  std::string name;
  bool entry = false, defined = false;
  std::vector<std::string> params, results;  // declarations
  std::vector<Item> body;
  uint32_t max_threads = 1024;
};

struct Variable {
  std::vector<uint8_t> bytes;  // the variable's memory
};

struct Module {
  std::string text;
  std::map<std::string, Function> functions;
  std::map<std::string, std::unique_ptr<Variable>> globals;
  std::map<std::string, std::string> shared;  // module-level declarations
  std::unordered_map<uint32_t, std::string> files;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;  // translated so far

  explicit Module(std::string text);
  const Kernel& kernel(const std::string& name);
  // The address of a variable or a function. Addresses of functions are mere numbers.
  uint64_t address_of(const std::string& name) const;
  static uint64_t function_number(uint64_t address) { return (address - kFunctions) / 16; }

 private:
  static constexpr uint64_t kFunctions = 0x100000;
};

// Names of the kinds of instructions that are counted.
uint32_t kind_of(const std::string& name);
const std::vector<std::string>& kinds();

// ------------------------------------------------------------------------------------------------------- decoding

struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class RegisterClass : uint8_t { predicate, b16, b32, b64 };
struct Register {
  uint32_t slot;
  RegisterClass kind;
};

class Translator;

// Decodes one statement. Every modifier must be taken: one that is left over is an error.
class Decoding {
 public:
  Decoding(Translator& translator, const Statement& statement, Instruction& out);

  bool take(const char* modifier);
  // The index of the modifier among these, or -1.
  int take_one_of(std::initializer_list<const char*> modifiers);
  // Takes the first modifier with this prefix; "" if there is none.
  std::string take_prefixed(const std::string& prefix);
  Type take_type();
  void finish() const;
  [[noreturn]] void fail(const std::string& why) const;

  size_t operands() const { return statement_.operands.size(); }
  const std::string& operand(size_t i) const;
  bool is_vector(size_t i) const { return operand(i)[0] == '{'; }
  std::vector<std::string> elements(size_t i) const;

  // A register, or the slot of a constant.
  uint32_t source(const std::string& text, Type type);
  Register destination(const std::string& text);
  void read(size_t operand, Type type) { out.src[out.srcs++] = source(this->operand(operand), type); }
  void read_text(const std::string& text, Type type) { out.src[out.srcs++] = source(text, type); }
  void write(size_t operand, Type type);
  void write_text(const std::string& text, Type type);
  // A predicate, perhaps negated.
  void read_predicate(size_t operand, bool& negated);
  // [base + offset]: reads the base, sets out.offset and out.wide. Parameters of an inlined call are in local memory.
  void read_address(size_t operand);
  Register register_of(const std::string& text);
  bool is_register(const std::string& text) const;
  int64_t immediate(const std::string& text) const;

  template <class T> static Type type_of() {
    if constexpr (sizeof(T) == 8) return Type::b64;
    if constexpr (sizeof(T) == 4) return Type::b32;
    return Type::b16;
  }
  // Calls then(T()) for the T that is the instruction's type.
  template <class... T, class Then> void by_type(Types<T...>, Type type, Then&& then) {
    if (!((means<T>(type) ? (then(T()), true) : false) || ...)) fail("type");
  }

  Instruction& out;
  const Statement& statement() const { return statement_; }
  Translator& translator() { return translator_; }

 private:
  Translator& translator_;
  const Statement& statement_;
  std::vector<bool> taken_;
};

using Decoder = std::function<void(Decoding&)>;
using Table = std::unordered_map<std::string, Decoder>;

// Every instruction there is, by its opcode.
const Table& table();
void add_arithmetic(Table&);
void add_bits(Table&);
void add_comparisons(Table&);
void add_conversions(Table&);
void add_memory(Table&);
void add_async(Table&);
void add_mbarriers(Table&);
void add_wmma(Table&);
void add_warp(Table&);
void add_matrix(Table&);

}  // namespace interpreter
