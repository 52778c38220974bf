// What every device's operators share: checks, allocation, and the parameters handed to a kernel. Whatever is passed to
// torch.ops.flashsoftmax, a kernel is only run on what these checks let through.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace flashsoftmax {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;

// A ValueError that says which argument, what it was and what is wanted.
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

inline const char* name(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return "another dtype";
  }
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

// The type of scores, statistics, lse and sums.
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
  check(x.device() == like.device(), argument, ": on another device than query; wanted all tensors on one device");
}
inline void check_like(const char* argument, const Tensor& x, const std::vector<int64_t>& wanted, const Tensor& like) {
  check_shape(argument, x, wanted);
  check_type(argument, x, like.scalar_type());
  check_device(argument, x, like);
}

// A tensor of 3 or 4 dimensions. One without elements has no memory, so nothing to step over.
inline Tensor4 view(const Tensor& x) {
  Tensor4 y{x.data_ptr()};
  if (x.numel() == 0) return y;
  y.batch = x.stride(0);
  y.head = x.stride(1);
  y.row = x.stride(2);
  y.dim = x.dim() == 4 ? x.stride(3) : 0;
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

// [batch, heads, rows, dims], in memory as [batch, rows, heads, dims] where that is how like lies.
inline Tensor empty_like_layout(const Tensor& like, int64_t dims, bool zero = false) {
  int64_t batch = like.size(0), heads = like.size(1), rows = like.size(2);
  auto allocate = [&](const std::vector<int64_t>& sizes) {
    return zero ? torch::stable::new_zeros(like, sizes) : torch::stable::new_empty(like, sizes);
  };
  if (heads > 1 && rows > 1 && like.stride(1) < like.stride(2))
    return torch::stable::transpose(allocate({batch, rows, heads, dims}), 1, 2);
  return allocate({batch, heads, rows, dims});
}

// The options of attention that are no tensors.
struct Options {
  int64_t max_seqlen_q, max_seqlen_k;
  double scale, softcap;
  OptionalInt window_left, window_right, q_offset, split_size;
};

struct Lengths {
  OptionalTensor kv_lens, cu_seqlens_q, cu_seqlens_k, block_table;
};

// Values of lengths, where the host can read them.
inline void check_cu_seqlens(const char* argument, const IntVector& cu, int64_t sequences, int64_t rows,
                             const char* limit_name, int64_t limit) {
  check(cu[0] == 0, argument, "[0]: ", cu[0], ", wanted 0");
  for (int64_t b = 0; b < sequences; b++) {
    int64_t length = cu[b + 1] - cu[b];
    check(cu[b + 1] >= cu[b] && cu[b + 1] <= rows, argument, "[", b + 1, "]: ", cu[b + 1], " after ", cu[b],
          ", wanted no less than that and no more than the ", rows, " rows there are");
    check(length <= limit, limit_name, ": ", limit, ", wanted at least ", length, ", the length of sequence ", b);
  }
  check(cu[sequences] == rows, argument, ": ends at ", cu[sequences], ", wanted the number of rows, ", rows);
}

inline void check_lengths(const AttentionParams& p, const Options& options) {
  if (p.cu_seqlens_q) {
    check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, p.sequences, p.rows_q, "max_seqlen_q", options.max_seqlen_q);
    check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, p.sequences, p.rows_k, "max_seqlen_k", options.max_seqlen_k);
  }
  for (int64_t b = 0; p.kv_lens && b < p.sequences; b++) {
    int64_t most = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.seqlen_k;
    check(p.kv_lens[b] >= 0 && p.kv_lens[b] <= most, "kv_lens[", b, "]: ", p.kv_lens[b], ", wanted 0 to ", most);
    for (int64_t i = 0; p.block_table && i * p.page_size < p.kv_lens[b]; i++) {
      int64_t page = p.block_table.advanced(b * p.block_table_row)[i];
      check(page >= 0 && page < p.pages, "block_table[", b, ", ", i, "]: page ", page, ", wanted 0 to ", p.pages - 1);
    }
  }
}

// Parameters with the lengths where the host can read them, for as long as this lives; those on a GPU are waited for.
class OnHost {
 public:
  OnHost(const AttentionParams& p, const Lengths& lengths) : p_(p) {
    read(lengths.kv_lens, p_.kv_lens);
    read(lengths.cu_seqlens_q, p_.cu_seqlens_q);
    read(lengths.cu_seqlens_k, p_.cu_seqlens_k);
    read(lengths.block_table, p_.block_table);
    if (lengths.block_table && !lengths.block_table->is_cpu()) p_.block_table_row = copies_.back().stride(0);
  }
  operator const AttentionParams&() const { return p_; }

 private:
  void read(const OptionalTensor& from, IntVector& to) {
    if (!from || from->is_cpu()) return;
    copies_.push_back(torch::stable::to(*from, torch::stable::Device(torch::headeronly::DeviceType::CPU)));
    const Tensor& copy = copies_.back();
    to = {copy.data_ptr(), copy.numel() ? copy.stride(copy.dim() - 1) : 0, to.is_int64};
  }

  AttentionParams p_;
  std::vector<Tensor> copies_;
};

inline AttentionParams attention_params(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                                        const OptionalTensor& sinks, const Lengths& lengths, const Options& options,
                                        bool reads_lengths) {
  AttentionParams p{};
  const bool paged = lengths.block_table.has_value();
  const char *key_name = paged ? "key_pages" : "key", *value_name = paged ? "value_pages" : "value";
  std::pair<const char*, const Tensor*> inputs[] = {{"query", &query}, {key_name, &key}, {value_name, &value}};
  for (auto [argument, x] : inputs) {
    check(x->dim() == 4, argument, ": ", x->dim(), " dimensions, wanted 4");
    check(x->scalar_type() == query.scalar_type(), argument, ": dtype ", name(x->scalar_type()),
          ", wanted that of query, ", name(query.scalar_type()));
    check_device(argument, *x, query);
    check(x->size(3) <= kMaxHeadDim, argument, ": head_dim ", x->size(3), ", wanted at most ", kMaxHeadDim);
  }
  std::optional<DType> dtype = dtype_of(query);
  check(dtype && *dtype != DType::boolean, "query: ", name(query.scalar_type()),
        ", wanted float16, bfloat16, float32 or (on the CPU) float64");
  p.dtype = *dtype;
  p.heads_q = query.size(1);
  p.heads_kv = key.size(1);
  p.head_dim = query.size(3);
  p.head_dim_v = value.size(3);
  p.rows_q = query.size(2);
  p.rows_k = key.size(2);
  check(paged || key.size(0) == query.size(0), "key: batch ", key.size(0), ", wanted that of query, ", query.size(0));
  check(key.size(3) == p.head_dim, key_name, ": head_dim ", key.size(3), ", wanted that of query, ", p.head_dim);
  const char* dimensions[] = {paged ? "pages" : "batch", "heads", paged ? "page_size" : "keys"};
  for (int64_t d = 0; d < 3; d++)
    check(value.size(d) == key.size(d), value_name, ": ", dimensions[d], " ", value.size(d), ", wanted that of ",
          key_name, ", ", key.size(d));
  check(p.heads_kv > 0 ? p.heads_q % p.heads_kv == 0 : p.heads_q == 0, "query: ", p.heads_q,
        " heads, wanted a multiple of the heads of ", key_name, ", ", p.heads_kv);

  const bool varlen = lengths.cu_seqlens_q || lengths.cu_seqlens_k;
  check(!(varlen && paged), "block_table: given together with cu_seqlens, wanted one of them");
  if (varlen) {
    check(lengths.cu_seqlens_q && lengths.cu_seqlens_k,
          "cu_seqlens_q, cu_seqlens_k: one of them is missing, wanted both");
    p.cu_seqlens_q = int_vector("cu_seqlens_q", *lengths.cu_seqlens_q, 1, query);
    p.cu_seqlens_k = int_vector("cu_seqlens_k", *lengths.cu_seqlens_k, 1, query);
    check(lengths.cu_seqlens_q->numel() >= 1, "cu_seqlens_q: no elements, wanted the number of sequences + 1");
    check_shape("cu_seqlens_k", *lengths.cu_seqlens_k, sizes(*lengths.cu_seqlens_q));
    check(query.size(0) == 1, "query: batch ", query.size(0), ", wanted 1 with cu_seqlens");
    check(options.max_seqlen_q >= 0, "max_seqlen_q: ", options.max_seqlen_q, ", wanted at least 0");
    check(options.max_seqlen_k >= 0, "max_seqlen_k: ", options.max_seqlen_k, ", wanted at least 0");
    p.sequences = lengths.cu_seqlens_q->numel() - 1;
    p.seqlen_q = std::min(options.max_seqlen_q, kUnbounded / 16);
    p.seqlen_k = std::min(options.max_seqlen_k, key.size(2));
  } else {
    p.sequences = query.size(0);
    p.seqlen_q = p.rows_q;
    p.seqlen_k = key.size(2);
  }
  if (paged) {
    p.block_table = int_vector("block_table", *lengths.block_table, 2, query);
    check(lengths.block_table->size(0) == p.sequences, "block_table: ", lengths.block_table->size(0),
          " rows, wanted the batch, ", p.sequences);
    check(lengths.kv_lens.has_value(), "kv_lens: missing, wanted with block_table");
    p.block_table_row = lengths.block_table->stride(0);
    p.page_size = key.size(2);
    p.pages = key.size(0);
    p.seqlen_k = lengths.block_table->size(1) * p.page_size;
  }
  if (lengths.kv_lens) {
    p.kv_lens = int_vector("kv_lens", *lengths.kv_lens, 1, query);
    check_shape("kv_lens", *lengths.kv_lens, {p.sequences});
  }

  check(std::isfinite(options.scale), "scale: ", options.scale, ", wanted a finite number");
  check(std::isfinite(options.softcap) && options.softcap >= 0, "softcap: ", options.softcap,
        ", wanted a positive finite number, or 0 for none");
  p.scale = options.scale;
  p.softcap = options.softcap;
  auto bound = [](const char* argument, const OptionalInt& value) {
    check(!value || *value >= 0, argument, ": ", value.value_or(0), ", wanted at least 0, or None for no bound");
    return value ? std::min(*value, kUnbounded) : kUnbounded;
  };
  p.window = {bound("window_left", options.window_left), bound("window_right", options.window_right)};
  constexpr int64_t most = int64_t(1) << 40;
  p.has_q_offset = options.q_offset.has_value();
  p.q_offset = options.q_offset.value_or(0);
  check(-most <= p.q_offset && p.q_offset <= most, "q_offset: ", p.q_offset, ", wanted between -2^40 and 2^40");
  p.split_size = options.split_size.value_or(default_split_size(p.seqlen_q));
  check(p.split_size > 0, "split_size: ", p.split_size, ", wanted at least 1");
  p.split_size = std::min(p.split_size, max<int64_t>(p.seqlen_k, 1));

  if (alibi_slopes) p.alibi_slopes = head_vector("alibi_slopes", *alibi_slopes, p.heads_q, query);
  if (sinks) p.sinks = head_vector("sinks", *sinks, p.heads_q, query);
  if (attn_mask) {
    check(!varlen, "attn_mask: given together with cu_seqlens, wanted without");
    check_shape("attn_mask", *attn_mask, {p.sequences, p.heads_q, p.rows_q, p.seqlen_k});
    check_device("attn_mask", *attn_mask, query);
    std::optional<DType> mask_dtype = dtype_of(*attn_mask);
    check(mask_dtype.has_value(), "attn_mask: ", name(attn_mask->scalar_type()), ", wanted bool or a floating dtype");
    p.mask = view(*attn_mask);
    p.mask_dtype = *mask_dtype;
  }

  p.query = view(query);
  p.key = view(key);
  p.value = view(value);
  if (reads_lengths) check_lengths(OnHost(p, lengths), options);
  return p;
}

// States (out, lse) of one shape, for merge.
struct MergeTensors {
  std::vector<MergeState> inputs;
  MergeParams params;
};

inline MergeState merge_state(const Tensor& out, const Tensor& lse) { return {view(out), view(lse)}; }

inline std::vector<MergeState> merge_inputs(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
  check(!outs.empty(), "outs: no states, wanted at least one");
  check(outs.size() == lses.size(), "lses: ", lses.size(), " states, wanted as many as outs, ", outs.size());
  std::vector<MergeState> inputs;
  for (size_t n = 0; n < outs.size(); n++) {
    std::string out_name = "outs[" + std::to_string(n) + "]", lse_name = "lses[" + std::to_string(n) + "]";
    check(outs[n].dim() == 4, out_name, ": ", outs[n].dim(), " dimensions, wanted 4");
    check_like(out_name.c_str(), outs[n], sizes(outs[0]), outs[0]);
    check_shape(lse_name.c_str(), lses[n], {outs[0].size(0), outs[0].size(1), outs[0].size(2)});
    check_type(lse_name.c_str(), lses[n], statistics_type(outs[0]));
    check_device(lse_name.c_str(), lses[n], outs[0]);
    inputs.push_back(merge_state(outs[n], lses[n]));
  }
  return inputs;
}

// inputs must outlive the parameters.
inline MergeParams merge_params(const std::vector<MergeState>& inputs, const Tensor& out, const Tensor& lse) {
  std::optional<DType> dtype = dtype_of(out);
  check(dtype && *dtype != DType::boolean, "outs[0]: ", name(out.scalar_type()),
        ", wanted float16, bfloat16, float32 or float64");
  return {*dtype,        out.size(0),          out.size(1), out.size(2), out.size(3), int64_t(inputs.size()),
          inputs.data(), merge_state(out, lse)};
}

// Scratch memory on the device of like.
inline Tensor scratch(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

// The operators on a device, which runs kernels on checked parameters: Device::attention(AttentionParams, like) and so
// on, like being a tensor there. Device::reads_lengths(like) says whether the values of lengths are checked here, or are
// left to the kernels.
template <class Device> struct Operators {
  static std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                              const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                                              const OptionalTensor& sinks, const OptionalTensor& kv_lens,
                                              const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                              const OptionalTensor& block_table, int64_t max_seqlen_q,
                                              int64_t max_seqlen_k, double scale, double softcap,
                                              OptionalInt window_left, OptionalInt window_right, OptionalInt q_offset,
                                              OptionalInt split_size) {
    const bool reads_lengths = Device::reads_lengths(query);
    AttentionParams p = attention_params(
        query, key, value, attn_mask, alibi_slopes, sinks, {kv_lens, cu_seqlens_q, cu_seqlens_k, block_table},
        {max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right, q_offset, split_size}, reads_lengths);
    const bool unread = !reads_lengths && cu_seqlens_q;  // rows behind the last sequence may be there
    Tensor out = empty_like_layout(query, p.head_dim_v, unread);
    Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, statistics_type(query));
    if (unread) torch::stable::fill_(lse, kHidden);
    p.out = view(out);
    p.lse = view(lse);
    if (lse.numel() > 0) Device::attention(p, query);
    return {out, lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
      const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& attn_mask,
      const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, const OptionalTensor& kv_lens,
      const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
      int64_t max_seqlen_k, double scale, double softcap, OptionalInt window_left, OptionalInt window_right,
      OptionalInt q_offset, bool mask_grad) {
    AttentionGradParams grad{};
    const bool reads_lengths = Device::reads_lengths(query);
    grad.forward = attention_params(
        query, key, value, attn_mask, alibi_slopes, sinks, {kv_lens, cu_seqlens_q, cu_seqlens_k, std::nullopt},
        {max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right, q_offset, std::nullopt}, reads_lengths);
    AttentionParams& p = grad.forward;
    const std::vector<int64_t> rows{query.size(0), query.size(1), query.size(2)};
    std::vector<int64_t> out_shape = rows;
    out_shape.push_back(p.head_dim_v);
    check_like("out", out, out_shape, query);
    check_shape("lse", lse, rows);
    check_type("lse", lse, statistics_type(query));
    check_device("lse", lse, query);
    if (grad_out) check_like("grad_out", *grad_out, out_shape, query);
    if (grad_lse) check_like("grad_lse", *grad_lse, rows, lse);
    check(!mask_grad || attn_mask, "mask_grad: True without attn_mask, wanted False");

    const bool unread = !reads_lengths && cu_seqlens_q;
    Tensor grad_query = empty_like_layout(query, p.head_dim, unread);
    Tensor grad_key = empty_like_layout(key, p.head_dim, /*zero=*/true);
    Tensor grad_value = empty_like_layout(value, p.head_dim_v, /*zero=*/true);
    Tensor grad_mask = torch::stable::new_zeros(lse, mask_grad ? sizes(*attn_mask) : std::vector<int64_t>{0});
    Tensor grad_sinks = torch::stable::new_zeros(lse, {sinks ? p.heads_q : 0});

    p.out = view(out);
    p.lse = view(lse);
    if (grad_out) grad.grad_out = view(*grad_out);
    if (grad_lse) grad.grad_lse = view(*grad_lse);
    grad.grad_query = view(grad_query);
    grad.grad_key = view(grad_key);
    grad.grad_value = view(grad_value);
    if (mask_grad) grad.grad_mask = view(grad_mask);
    if (sinks) grad.grad_sinks = grad_sinks.data_ptr();
    if (lse.numel() > 0) Device::attention_grad(grad, query);
    return {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
  }

  static std::tuple<Tensor, Tensor> merge(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
    std::vector<MergeState> inputs = merge_inputs(outs, lses);
    Tensor out = empty_like_layout(outs[0], outs[0].size(3));
    Tensor lse = torch::stable::new_empty(lses[0], sizes(lses[0]));
    MergeParams params = merge_params(inputs, out, lse);
    if (lse.numel() > 0) Device::merge(params, lse);
    return {out, lse};
  }

  static std::tuple<Tensor, Tensor> merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                                   const std::vector<Tensor>& outs, const std::vector<Tensor>& lses,
                                                   const Tensor& lse) {
    std::vector<MergeState> inputs = merge_inputs(outs, lses);
    check_like("lse", lse, sizes(lses[0]), lses[0]);
    if (grad_out) check_like("grad_out", *grad_out, sizes(outs[0]), outs[0]);
    if (grad_lse) check_like("grad_lse", *grad_lse, sizes(lse), lse);
    const int64_t states = outs.size();
    auto stacked = [&](const Tensor& x) {
      std::vector<int64_t> shape = sizes(x);
      shape.insert(shape.begin(), states);
      return torch::stable::new_empty(x, shape);
    };
    Tensor grad_outs = stacked(outs[0]), grad_lses = stacked(lse);
    std::vector<MergeState> grad_inputs;
    for (int64_t n = 0; n < states; n++)
      grad_inputs.push_back(
          merge_state(torch::stable::select(grad_outs, 0, n), torch::stable::select(grad_lses, 0, n)));
    MergeGradParams params{merge_params(inputs, outs[0], lse),
                           {grad_out ? view(*grad_out) : Tensor4{}, grad_lse ? view(*grad_lse) : Tensor4{}},
                           grad_inputs.data()};
    params.forward.output.out = {};
    if (lse.numel() > 0) Device::merge_grad(params, lse);
    return {grad_outs, grad_lses};
  }

  template <class Library> static void implement(Library& m) {
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
    m.impl("merge", TORCH_BOX(&merge));
    m.impl("merge_backward", TORCH_BOX(&merge_backward));
  }
};

// The schemas. Devices implement them.
template <class Library> void define_operators(Library& m) {
  // query [B, Hq, Sq, Dqk], key [B, Hkv, Sk, Dqk], value [B, Hkv, Sk, Dv] -> out [B, Hq, Sq, Dv], lse [B, Hq, Sq]
  // varlen (cu_seqlens): B is 1 and the sequences follow each other as rows. paged (block_table): key, value
  // [pages, Hkv, page_size, D]. attn_mask [B, Hq, Sq, Sk]; sinks, alibi_slopes [Hq] and lse: float32 (float64 for
  // float64).
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, "
      "Tensor? kv_lens, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table, int max_seqlen_q, int max_seqlen_k, float "
      "scale, "
      "float softcap, int? window_left, int? window_right, int? q_offset, int? split_size) -> (Tensor, Tensor)");
  // -> gradients of query, key, value, attn_mask [B, Hq, Sq, Sk] and sinks; of the last two empty what was not asked
  // for
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, "
      "Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? kv_lens, Tensor? cu_seqlens_q, Tensor? "
      "cu_seqlens_k, "
      "int max_seqlen_q, int max_seqlen_k, float scale, float softcap, int? window_left, int? window_right, int? "
      "q_offset, "
      "bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // outs [B, H, S, D] and lses [B, H, S], one of each a state
  m.def("merge(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");
  // -> gradients of outs and lses, stacked on a leading axis of states
  m.def(
      "merge_backward(Tensor? grad_out, Tensor? grad_lse, Tensor[] outs, Tensor[] lses, Tensor lse) -> (Tensor, "
      "Tensor)");
}

}  // namespace flashsoftmax
