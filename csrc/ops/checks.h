// Checks of single tensors, and their conversion to the plain structs of params.h. Errors are ValueErrors in Python.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cctype>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../params.h"

namespace flashsoftmax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;

// Throws a ValueError unless the condition holds. The message names the argument, what was found and what is wanted.
template <class... Parts> void check(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline std::string shape(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); i++) text << (i ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}
inline std::vector<int64_t> sizes(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

// The Python name of a dtype, such as float16.
inline std::string name(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: break;
  }
  std::string lower = torch::headeronly::toString(type);  // Float8_e4m3fn, UInt16, ...
  for (char& c : lower) c = static_cast<char>(std::tolower(c));
  return lower;
}

inline std::string name(const torch::stable::Device& device) {
  using torch::headeronly::DeviceType;
  const std::string kind = device.type() == DeviceType::CPU    ? "cpu"
                           : device.type() == DeviceType::CUDA ? "cuda"
                           : device.type() == DeviceType::Meta ? "meta"
                                                               : "another device";
  return device.has_index() ? kind + ":" + std::to_string(device.index()) : kind;
}

inline std::optional<DType> dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Float: return DType::f32;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Bool: return DType::boolean;
    default: return std::nullopt;
  }
}

// The dtype of scores, lse and sums for tensors of the dtype of x.
inline ScalarType statistics_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_shape(const char* argument, const Tensor& x, const std::vector<int64_t>& wanted) {
  check(sizes(x) == wanted, argument, ": shape ", shape(sizes(x)), ", wanted ", shape(wanted));
}
inline void check_type(const char* argument, const Tensor& x, ScalarType wanted) {
  check(x.scalar_type() == wanted, argument, ": dtype ", name(x.scalar_type()), ", wanted ", name(wanted));
}
inline void check_device(const char* argument, const Tensor& x, const Tensor& like) {
  check(x.device() == like.device(), argument, ": device ", name(x.device()), ", wanted that of the other tensors, ",
        name(like.device()));
}
inline void check_like(const char* argument, const Tensor& x, const std::vector<int64_t>& wanted, const Tensor& like) {
  check_shape(argument, x, wanted);
  check_type(argument, x, like.scalar_type());
  check_device(argument, x, like);
}

// A tensor that is written: each of its elements needs memory of its own.
inline void check_output(const char* argument, const Tensor& x, const std::vector<int64_t>& wanted, ScalarType type,
                         const Tensor& like) {
  check_shape(argument, x, wanted);
  check_type(argument, x, type);
  check_device(argument, x, like);
  for (int64_t d = 0; d < x.dim(); d++)
    check(x.stride(d) != 0 || x.size(d) <= 1, argument, ": axis ", d, " is expanded, wanted memory for each element");
}

// A tensor of 3 or 4 dimensions as a kernel sees it. Empty tensors get zero strides.
inline Tensor4 view(const Tensor& x) {
  Tensor4 y{x.data_ptr()};
  if (x.numel() == 0) return y;
  y.batch = x.stride(0);
  y.head = x.stride(1);
  y.row = x.stride(2);
  y.dim = x.dim() == 4 ? x.stride(3) : 0;
  return y;
}

// A tensor of 4 dimensions in which an axis of size 1 stands for any size.
inline Tensor4 broadcast_view(const Tensor& x) {
  Tensor4 y = view(x);
  if (x.size(0) == 1) y.batch = 0;
  if (x.size(1) == 1) y.head = 0;
  if (x.size(2) == 1) y.row = 0;
  if (x.size(3) == 1) y.dim = 0;
  return y;
}

inline IntVector int_vector(const char* argument, const Tensor& x, int64_t dim, const Tensor& like) {
  check(x.dim() == dim, argument, ": ", x.dim(), " dimensions, wanted ", dim);
  check(x.scalar_type() == ScalarType::Int || x.scalar_type() == ScalarType::Long, argument, ": dtype ",
        name(x.scalar_type()), ", wanted int32 or int64");
  check_device(argument, x, like);
  return {x.data_ptr(), x.numel() ? x.stride(dim - 1) : 0, x.scalar_type() == ScalarType::Long};
}

inline HeadVector head_vector(const char* argument, const Tensor& x, int64_t heads, const Tensor& query) {
  check_shape(argument, x, {heads});
  check_type(argument, x, statistics_type(query));
  check_device(argument, x, query);
  return {x.data_ptr(), x.stride(0)};
}
// [heads] or [sequences, heads]
inline HeadVector head_vectors(const char* argument, const Tensor& x, int64_t sequences, int64_t heads,
                               const Tensor& query) {
  if (x.dim() != 2) return head_vector(argument, x, heads, query);
  check_shape(argument, x, {sequences, heads});
  check_type(argument, x, statistics_type(query));
  check_device(argument, x, query);
  return {x.data_ptr(), x.stride(1), x.stride(0)};
}

}  // namespace flashsoftmax
