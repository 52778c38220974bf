// Parses PTX text into functions and statements.
#include <cctype>
#include <sstream>

#include "program.h"
#include "text.h"

namespace interpreter {
namespace {

// Removes comments but keeps line breaks.
std::string without_comments(const std::string& from) {
  std::string to;
  bool quoted = false;
  for (size_t i = 0; i < from.size(); i++) {
    if (from[i] == '"') quoted = !quoted;
    if (!quoted && from.compare(i, 2, "//") == 0) {
      while (i < from.size() && from[i] != '\n') i++;
    } else if (!quoted && from.compare(i, 2, "/*") == 0) {
      const size_t end = std::min(from.find("*/", i), from.size());
      for (; i < end; i++)
        if (from[i] == '\n') to += '\n';
      i++;
      continue;
    }
    if (i < from.size()) to += from[i];
  }
  return to;
}

Statement parse_statement(std::string text, uint32_t line, const Location& location) {
  Statement s;
  for (char& c : text)
    if (std::isspace(static_cast<unsigned char>(c))) c = ' ';
  s.text = text;
  s.line = line;
  s.location = location;
  if (text[0] == '@') {
    const size_t end = text.find(' ');
    s.guard_negated = text[1] == '!';
    s.guard = text.substr(s.guard_negated ? 2 : 1, end - (s.guard_negated ? 2 : 1));
    text = trim(text.substr(end));
  }
  const size_t end = std::min(text.find(' '), text.size());
  std::istringstream words(text.substr(0, end));
  std::getline(words, s.opcode, '.');
  for (std::string word; std::getline(words, word, '.');) s.modifiers.push_back(word);
  s.operands = split(text.substr(end));
  return s;
}

class Parser {
 public:
  explicit Parser(Module& module) : module_(module), text_(without_comments(module.text)) {}

  void parse() {
    while (skip_space()) {
      const std::string word = next_word();
      if (word == ".version" || word == ".target" || word == ".address_size") {
        until("\n");
      } else if (word == ".file") {
        file(until("\n"));
      } else if (word == ".section") {
        until("{");
        matching_brace();
      } else if (word == ".visible" || word == ".weak" || word == ".common" || word == ".extern") {
        external_ = word == ".extern";
        continue;
      } else if (word == ".entry" || word == ".func") {
        function(word == ".entry");
      } else if (word == ".global" || word == ".const") {
        global(word + " " + until(";"));
      } else if (word == ".shared") {
        const std::string declaration = (external_ ? ".extern .shared " : ".shared ") + until(";");
        module_.shared[parse_declaration(declaration).name] = declaration;
      } else {
        until(";");
      }
      external_ = false;
    }
    for (const Initial& initial : initials_) initialise(initial);
  }

  uint32_t line() const { return line_; }

 private:
  // A variable's initial value. It may name a function or variable declared later, so it is evaluated last.
  struct Initial {
    std::string text;
    uint8_t* at;
    uint32_t bytes, line;
  };

  void initialise(const Initial& initial) {
    line_ = initial.line;
    uint64_t bits = 0;
    if (is_number(initial.text)) {
      bits = parse_number(initial.text);
    } else {
      std::string name = initial.text;
      if (name.rfind("generic(", 0) == 0) name = name.substr(8, name.find(')') - 8) + name.substr(name.find(')') + 1);
      const size_t plus = std::min(name.find('+'), name.size());
      bits = module_.address_of(trim(name.substr(0, plus)));
      if (plus < name.size()) bits += parse_number(trim(name.substr(plus + 1)));
    }
    std::memcpy(initial.at, &bits, initial.bytes);
  }

  bool skip_space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) advance();
    return at_ < text_.size();
  }
  void advance() { line_ += text_[at_++] == '\n'; }
  std::string next_word() {
    const size_t begin = at_;
    while (at_ < text_.size() && !std::isspace(static_cast<unsigned char>(text_[at_]))) at_++;
    return text_.substr(begin, at_ - begin);
  }
  // The text up to one of these characters, which is skipped.
  std::string until(const char* ends) {
    const size_t begin = at_;
    while (at_ < text_.size() && !std::strchr(ends, text_[at_])) advance();
    const std::string passed = text_.substr(begin, at_ - begin);
    if (at_ < text_.size()) advance();
    return passed;
  }
  void matching_brace() {
    for (int depth = 1; depth > 0 && at_ < text_.size(); advance()) depth += (text_[at_] == '{') - (text_[at_] == '}');
  }

  void file(const std::string& rest) {
    const size_t begin = rest.find('"'), end = rest.find('"', begin + 1);
    module_.files[std::stoul(rest)] = rest.substr(begin + 1, end - begin - 1);
  }

  void global(const std::string& text) {
    const Declaration d = parse_declaration(text);
    auto variable = std::make_unique<Variable>();
    variable->bytes.assign(std::max<size_t>(d.bytes(), 1), 0);
    const size_t equals = text.find('=');
    if (equals != std::string::npos) {
      std::string list = trim(text.substr(equals + 1));
      if (list[0] == '{') list = list.substr(1, list.rfind('}') - 1);
      size_t at = 0;
      for (const std::string& value : split(list)) {
        if (at + d.element > variable->bytes.size()) throw Unsupported("too many values of " + d.name);
        initials_.push_back({value, variable->bytes.data() + at, d.element, line_});
        at += d.element;
      }
    }
    module_.globals[d.name] = std::move(variable);
  }

  void function(bool entry) {
    const size_t begin = at_;
    while (text_[at_] != '{' && text_[at_] != ';') advance();
    std::string header = trim(text_.substr(begin, at_ - begin));
    Function f;
    f.entry = entry;
    f.defined = text_[at_] == '{';
    const auto list = [&] {  // in parentheses
      const size_t end = header.find(')');
      const std::vector<std::string> declarations = split(header.substr(1, end - 1));
      header = trim(header.substr(end + 1));
      return declarations;
    };
    if (header[0] == '(') f.results = list();
    const size_t name_end = std::min(header.find_first_of(" \t\n("), header.size());
    f.name = header.substr(0, name_end);
    header = trim(header.substr(name_end));
    if (!header.empty() && header[0] == '(') f.params = list();
    for (const char* limit : {".maxntid", ".reqntid"})
      if (const size_t found = header.find(limit); found != std::string::npos) {
        f.max_threads = 1;
        std::istringstream sizes(header.substr(found + std::strlen(limit)));
        for (uint32_t size; sizes >> size; sizes.ignore(1, ',')) {
          f.max_threads *= size;
          while (sizes.peek() == ' ') sizes.get();
          if (sizes.peek() != ',') break;
        }
      }
    advance();
    if (f.defined) body(f);
    if (f.defined || !module_.functions.count(f.name)) module_.functions[f.name] = std::move(f);
  }

  void body(Function& f) {
    Location location;
    std::string text;  // of the statement so far
    uint32_t line = line_;
    int scopes = 1, braces = 0;
    const auto add = [&](Item::Kind kind) {
      f.body.push_back({kind, {}, trim(text)});
      text.clear();
    };
    for (; at_ < text_.size() && scopes > 0; advance()) {
      const char c = text_[at_];
      const bool empty = trim(text).empty();
      if (empty) line = line_;
      if (c == '{' && empty) {
        scopes++;
        add(Item::open);
      } else if (c == '}' && braces == 0) {
        if (--scopes > 0) add(Item::close);
      } else if (c == ';') {
        const std::string whole = trim(text);
        if (whole.empty()) continue;
        if (whole[0] == '.') {
          add(Item::declaration);
        } else {
          f.body.push_back({Item::statement, parse_statement(whole, line, location), {}});
          text.clear();
        }
      } else if (c == ':' && braces == 0 && is_identifier(trim(text)) && text_[at_ + 1] != ':') {
        add(Item::label);
      } else if (c == '\n' && trim(text).rfind(".loc", 0) == 0) {
        location = parse_location(trim(text));
        text.clear();
      } else {
        braces += (c == '{') - (c == '}');
        text += c;
      }
    }
  }

  static bool is_identifier(const std::string& text) {
    for (unsigned char c : text)
      if (!std::isalnum(c) && c != '_' && c != '$') return false;
    return !text.empty();
  }

  // .loc file line column[, function_name ..., inlined_at file line column]
  static Location parse_location(const std::string& text) {
    Location location;
    std::istringstream(text.substr(4)) >> location.file >> location.line;
    if (const size_t at = text.find("inlined_at"); at != std::string::npos)
      std::istringstream(text.substr(at + 10)) >> location.inlined_file >> location.inlined_line;
    return location;
  }

  Module& module_;
  const std::string text_;
  size_t at_ = 0;
  uint32_t line_ = 1;
  bool external_ = false;
  std::vector<Initial> initials_;
};

}  // namespace

std::string trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n"), end = text.find_last_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char c : text) {
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c == ',' && depth == 0) {
      parts.push_back(trim(part));
      part.clear();
    } else {
      part += c;
    }
  }
  if (!trim(part).empty()) parts.push_back(trim(part));
  return parts;
}

Type parse_type(const std::string& name) {
  static const std::unordered_map<std::string, Type> types = {
      {"u8", Type::u8},       {"u16", Type::u16},       {"u32", Type::u32}, {"u64", Type::u64},   {"s8", Type::s8},
      {"s16", Type::s16},     {"s32", Type::s32},       {"s64", Type::s64}, {"b8", Type::b8},     {"b16", Type::b16},
      {"b32", Type::b32},     {"b64", Type::b64},       {"f16", Type::f16}, {"f32", Type::f32},   {"bf16", Type::bf16},
      {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}, {"f64", Type::f64}, {"b128", Type::b128}, {"pred", Type::pred},
      {"tf32", Type::tf32}};
  const auto found = types.find(name);
  return found == types.end() ? Type::none : found->second;
}

bool is_number(const std::string& text) {
  return !text.empty() && (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-');
}

uint64_t parse_number(const std::string& text) try {
  if (text.size() > 2 && text[0] == '0' && std::strchr("fFdD", text[1]))
    return std::stoull(text.substr(2), nullptr, 16);
  return text[0] == '-' ? uint64_t(std::stoll(text, nullptr, 0)) : std::stoull(text, nullptr, 0);
} catch (const std::logic_error&) {
  throw Unsupported("unsupported: number " + text);
}

Declaration parse_declaration(const std::string& text) {
  Declaration d;
  std::string head = text.substr(0, text.find('='));
  if (const size_t bracket = head.find('['); bracket != std::string::npos) {
    d.array = true;
    for (size_t at = bracket; at != std::string::npos; at = head.find('[', at + 1))
      d.count *= head[at + 1] == ']' ? 0 : parse_number(head.substr(at + 1, head.find(']', at) - at - 1));
    head = head.substr(0, bracket);
  }
  std::istringstream words(head);
  for (std::string word; words >> word;) {
    if (word == ".align") {
      words >> d.align;
    } else if (word == ".extern") {
      d.external = true;
    } else if (word[0] == '.') {
      if (const Type type = parse_type(word.substr(1)); type != Type::none) d.element = bytes(type);
    } else {
      d.name = word;
    }
  }
  d.align = std::max(d.align, d.element);
  return d;
}

uint64_t Module::address_of(const std::string& name) const {
  if (const auto variable = globals.find(name); variable != globals.end())
    return reinterpret_cast<uint64_t>(variable->second->bytes.data());
  const auto function = functions.find(name);
  if (function == functions.end()) throw Unsupported("unsupported: address of " + name);
  return kFunctions + 16 * std::distance(functions.begin(), function);
}

Module::Module(std::string ptx) : text(std::move(ptx)) {
  Parser parser(*this);
  try {
    parser.parse();
  } catch (const std::exception& error) {
    throw Unsupported("PTX line " + std::to_string(parser.line()) + ": " + error.what());
  }
}

}  // namespace interpreter
