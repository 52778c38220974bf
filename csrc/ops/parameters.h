// Checks the arguments of an operator and turns them into the parameters of a kernel (params.h). No kernel runs on
// arguments that fail a check.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "../kernels.h"
#include "checks.h"

namespace flashsoftmax {

// A tensor [batch, heads, rows, dims], uninitialised or zeroed. Stored as [batch, rows, heads, dims] if `like` is, else
// contiguous.
inline Tensor empty_like_layout(const Tensor& like, int64_t dims, bool zero = false) {
  const int64_t batch = like.size(0), heads = like.size(1), rows = like.size(2);
  auto allocate = [&](const std::vector<int64_t>& sizes) {
    return zero ? torch::stable::new_zeros(like, sizes) : torch::stable::new_empty(like, sizes);
  };
  if (like.stride(1) < like.stride(2)) return torch::stable::transpose(allocate({batch, rows, heads, dims}), 1, 2);
  return allocate({batch, heads, rows, dims});
}

// The arguments of attention and of its backward, as the schemas name them.
struct AttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &attn_mask, &attn_bias, &alibi_slopes, &sinks;
  const OptionalTensor &kv_lens, &kv_starts, &q_lens, &cu_seqlens_q, &cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double scale, softcap;
  OptionalInt window_left, window_right, q_offset;
  const OptionalTensor& block_table;
  OptionalInt split_size;
  double dropout_p;
  const OptionalTensor& dropout_seed;
};

// Checks the values of cu_seqlens, which are in host memory.
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

// Checks the values of kv_lens, cu_seqlens and block tables, which are in host memory. A page that no query sees may be
// anything: a sliding window lets its pages go.
inline void check_lengths(const AttentionParams& p, const AttentionArguments& a) {
  if (p.cu_seqlens_q) {
    check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, p.sequences, p.rows_q, "max_seqlen_q", a.max_seqlen_q);
    if (p.cu_seqlens_k)
      check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, p.sequences, p.rows_k, "max_seqlen_k", a.max_seqlen_k);
  }
  for (int64_t b = 0; p.q_lens && b < p.sequences; b++)
    check(p.q_lens[b] >= 0 && p.q_lens[b] <= p.seqlen_q, "q_lens[", b, "]: ", p.q_lens[b], ", wanted 0 to ",
          p.seqlen_q);
  for (int64_t b = 0; p.kv_lens && b < p.sequences; b++) {
    int64_t most = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b] : p.seqlen_k;
    check(p.kv_lens[b] >= 0 && p.kv_lens[b] <= most, "kv_lens[", b, "]: ", p.kv_lens[b], ", wanted 0 to ", most);
  }
  for (int64_t b = 0; p.kv_starts && b < p.sequences; b++)
    check(p.kv_starts[b] >= 0, "kv_starts[", b, "]: ", p.kv_starts[b], ", wanted at least 0");
  for (int64_t b = 0; p.block_table && b < p.sequences; b++) {
    const Sequence s = sequence(p, b);
    const int64_t first = s.first_key + s.band.first(0);
    const int64_t end = s.q_len > 0 ? s.first_key + s.band.end(s.q_len - 1) : 0;
    for (int64_t j = first; j < end; j = (j / p.page_size + 1) * p.page_size) {
      const int64_t i = j / p.page_size, page = p.block_table.advanced(b * p.block_table_row)[i];
      check(page >= 0 && page < p.pages, "block_table[", b, ", ", i, "]: page ", page, ", wanted 0 to ", p.pages - 1);
    }
  }
}

// The parameters with all lengths in host memory, valid while this object lives. Lengths on a GPU are copied, which
// waits for the GPU.
class OnHost {
 public:
  OnHost(const AttentionParams& p, const AttentionArguments& a) : p_(p) {
    read(a.q_lens, p_.q_lens);
    read(a.kv_lens, p_.kv_lens);
    read(a.kv_starts, p_.kv_starts);
    read(a.cu_seqlens_q, p_.cu_seqlens_q);
    read(a.cu_seqlens_k, p_.cu_seqlens_k);
    read(a.block_table, p_.block_table);
    if (a.block_table && !a.block_table->is_cpu()) p_.block_table_row = copies_.back().stride(0);
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

inline std::vector<int64_t> scores_shape(const AttentionParams& p) {
  return {p.sequences, p.heads_q, p.rows_q, p.seqlen_k};
}

// The shapes and dtypes of query, key and value.
inline void check_operands(const AttentionArguments& a) {
  const Tensor &query = a.query, &key = a.key, &value = a.value;
  const bool paged = a.block_table.has_value();
  const bool named_pages = paged && !a.cu_seqlens_q;  // by attention_paged
  const char *key_name = named_pages ? "key_pages" : "key", *value_name = named_pages ? "value_pages" : "value";
  std::pair<const char*, const Tensor*> operands[] = {{"query", &query}, {key_name, &key}, {value_name, &value}};
  for (auto [argument, x] : operands) {
    check(x->dim() == 4, argument, ": ", x->dim(), " dimensions, wanted 4");
    check(x->scalar_type() == query.scalar_type(), argument, ": dtype ", name(x->scalar_type()),
          ", wanted that of query, ", name(query.scalar_type()));
    check_device(argument, *x, query);
    check(x->size(3) <= kMaxHeadDim, argument, ": head_dim ", x->size(3), ", wanted at most ", kMaxHeadDim);
  }
  std::optional<DType> dtype = dtype_of(query);
  check(dtype && *dtype != DType::boolean, "query: dtype ", name(query.scalar_type()),
        ", wanted float16, bfloat16, float32 or (on the CPU) float64");
  check(paged || key.size(0) == query.size(0), "key: batch ", key.size(0), ", wanted that of query, ", query.size(0));
  check(key.size(3) == query.size(3), key_name, ": head_dim ", key.size(3), ", wanted that of query, ", query.size(3));
  const char* dimensions[] = {paged ? "pages" : "batch", "heads", paged ? "page_size" : "keys"};
  for (int64_t d = 0; d < 3; d++)
    check(value.size(d) == key.size(d), value_name, ": ", dimensions[d], " ", value.size(d), ", wanted that of ",
          key_name, ", ", key.size(d));
  check(key.size(1) > 0 ? query.size(1) % key.size(1) == 0 : query.size(1) == 0, "query: ", query.size(1),
        " heads, wanted a multiple of the heads of ", key_name, ", ", key.size(1));
}

// The sequences: dense, packed (varlen) or in pages.
inline void set_sequences(AttentionParams& p, const AttentionArguments& a) {
  const bool varlen = a.cu_seqlens_q || a.cu_seqlens_k;
  check(!(a.cu_seqlens_k && a.block_table), "block_table: given together with cu_seqlens_k, wanted one of them");
  p.sequences = a.query.size(0);
  p.seqlen_q = p.rows_q;
  p.seqlen_k = p.rows_k;
  if (varlen) {
    check(a.cu_seqlens_q && (a.cu_seqlens_k || a.block_table),
          "cu_seqlens_q, cu_seqlens_k: one of them is missing, wanted both");
    p.cu_seqlens_q = int_vector("cu_seqlens_q", *a.cu_seqlens_q, 1, a.query);
    check(a.cu_seqlens_q->numel() >= 1, "cu_seqlens_q: no elements, wanted the number of sequences + 1");
    check(a.query.size(0) == 1, "query: batch ", a.query.size(0), ", wanted 1 with cu_seqlens");
    check(a.max_seqlen_q >= 0, "max_seqlen_q: ", a.max_seqlen_q, ", wanted at least 0");
    check(a.max_seqlen_k >= 0, "max_seqlen_k: ", a.max_seqlen_k, ", wanted at least 0");
    p.sequences = a.cu_seqlens_q->numel() - 1;
    p.seqlen_q = std::min(a.max_seqlen_q, kUnbounded / 16);
    p.seqlen_k = std::min(a.max_seqlen_k, p.rows_k);
  }
  if (a.cu_seqlens_k) {
    p.cu_seqlens_k = int_vector("cu_seqlens_k", *a.cu_seqlens_k, 1, a.query);
    check_shape("cu_seqlens_k", *a.cu_seqlens_k, sizes(*a.cu_seqlens_q));
  }
  if (a.block_table) {
    p.block_table = int_vector("block_table", *a.block_table, 2, a.query);
    check(a.block_table->size(0) == p.sequences, "block_table: ", a.block_table->size(0),
          varlen ? " rows, wanted the number of sequences, " : " rows, wanted the batch, ", p.sequences);
    check(a.kv_lens.has_value(), "kv_lens: missing, wanted with block_table");
    p.block_table_row = a.block_table->stride(0);
    p.page_size = a.key.size(2);
    p.pages = a.key.size(0);
    const int64_t columns = a.block_table->size(1), most = kUnbounded / max<int64_t>(p.page_size, 1);
    check(columns <= most, "block_table: ", columns, " columns, wanted at most ", most);
    p.seqlen_k = columns * p.page_size;
  }
  auto per_sequence = [&](const char* argument, const OptionalTensor& x) {
    if (!x) return IntVector{};
    IntVector lengths = int_vector(argument, *x, 1, a.query);
    check_shape(argument, *x, {p.sequences});
    return lengths;
  };
  check(!(varlen && a.q_lens), "q_lens: given together with cu_seqlens, wanted without");
  p.q_lens = per_sequence("q_lens", a.q_lens);
  p.kv_lens = per_sequence("kv_lens", a.kv_lens);
  p.kv_starts = per_sequence("kv_starts", a.kv_starts);
}

// A tensor that is broadcast to the scores.
inline Tensor4 scores_view(const char* argument, const Tensor& x, const AttentionParams& p, const Tensor& query) {
  check(!p.cu_seqlens_q, argument, ": given together with cu_seqlens, wanted without");
  const std::vector<int64_t> scores = scores_shape(p);
  bool fits = x.dim() == 4;
  for (int64_t d = 0; fits && d < 4; d++) fits = x.size(d) == scores[d] || x.size(d) == 1;
  check(fits, argument, ": shape ", shape(sizes(x)), ", wanted one broadcastable to ", shape(scores));
  check_device(argument, x, query);
  return broadcast_view(x);
}

// Which keys a query sees, at what score, and in what splits.
inline void set_options(AttentionParams& p, const AttentionArguments& a) {
  // Kernels use numbers in the type of the statistics: that value has to make sense.
  const bool is_float = p.dtype != DType::f64;
  auto rounded = [&](double x) { return is_float ? double(float(x)) : x; };
  const char* type = is_float ? "float32" : "float64";
  check(std::isfinite(rounded(a.scale)), "scale: ", a.scale, ", wanted a number that is finite in ", type);
  check(a.softcap == 0 || (std::isfinite(rounded(a.softcap)) && rounded(a.softcap) > 0), "softcap: ", a.softcap,
        ", wanted a number that is positive and finite in ", type, ", or 0 for none");
  p.scale = a.scale;
  p.softcap = a.softcap;
  auto bound = [](const char* argument, const OptionalInt& value) {
    check(!value || *value >= 0, argument, ": ", value.value_or(0), ", wanted at least 0, or None for no bound");
    return value ? std::min(*value, kUnbounded) : kUnbounded;
  };
  p.window = {bound("window_left", a.window_left), bound("window_right", a.window_right)};
  constexpr int64_t most = int64_t(1) << 40;
  p.has_q_offset = a.q_offset.has_value();
  p.q_offset = a.q_offset.value_or(0);
  check(-most <= p.q_offset && p.q_offset <= most, "q_offset: ", p.q_offset, ", wanted between -2^40 and 2^40");
  p.split_size = a.split_size.value_or(default_split_size(p.seqlen_q));
  check(p.split_size > 0, "split_size: ", p.split_size, ", wanted at least 1");
  p.split_size = std::min(p.split_size, max<int64_t>(p.seqlen_k, 1));
  p.decode_split_size =
      std::min(a.split_size.value_or(default_split_size(kDecodeQueries)), max<int64_t>(p.seqlen_k, 1));

  check(a.dropout_p == 0, "dropout_p: ", a.dropout_p, " is not supported, wanted 0");
  if (a.alibi_slopes) p.alibi_slopes = head_vectors("alibi_slopes", *a.alibi_slopes, p.sequences, p.heads_q, a.query);
  if (a.sinks) p.sinks = head_vector("sinks", *a.sinks, p.heads_q, a.query);
  if (a.attn_mask) {
    p.mask = scores_view("attn_mask", *a.attn_mask, p, a.query);
    check_type("attn_mask", *a.attn_mask, ScalarType::Bool);
  }
  if (a.attn_bias) {
    p.bias = scores_view("attn_bias", *a.attn_bias, p, a.query);
    std::optional<DType> dtype = dtype_of(*a.attn_bias);
    check(dtype && *dtype != DType::boolean, "attn_bias: dtype ", name(a.attn_bias->scalar_type()),
          ", wanted a floating dtype");
    p.bias_dtype = *dtype;
  }
}

// The parameters of attention, from checked arguments. The values of lengths are checked only if reads_lengths.
inline AttentionParams attention_params(const AttentionArguments& a, bool reads_lengths) {
  check_operands(a);
  AttentionParams p{};
  p.dtype = *dtype_of(a.query);
  p.heads_q = a.query.size(1);
  p.heads_kv = a.key.size(1);
  p.head_dim = a.query.size(3);
  p.head_dim_v = a.value.size(3);
  p.rows_q = a.query.size(2);
  p.rows_k = a.key.size(2);
  set_sequences(p, a);
  set_options(p, a);
  p.query = view(a.query);
  p.key = view(a.key);
  p.value = view(a.value);
  if (reads_lengths) check_lengths(OnHost(p, a), a);
  return p;
}

inline MergeState merge_state(const Tensor& out, const Tensor& lse) { return {view(out), view(lse)}; }

// The states (out, lse) that merge takes, all of one shape.
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

// The parameters of a merge of inputs into output. inputs must outlive the result.
inline MergeParams merge_params(const std::vector<MergeState>& inputs, const Tensor& out, const MergeState& output) {
  std::optional<DType> dtype = dtype_of(out);
  check(dtype && *dtype != DType::boolean, "outs[0]: dtype ", name(out.scalar_type()),
        ", wanted float16, bfloat16, float32 or float64");
  return {*dtype, out.size(0), out.size(1), out.size(2), out.size(3), int64_t(inputs.size()), inputs.data(), output};
}

// The rotation of rows like those of x, whose first row of each sequence is at position starts[b].
inline Rotary rotary_params(const Tensor& x, const Tensor& cos, const Tensor& sin, const IntVector& starts,
                            bool interleaved, bool same_position) {
  Rotary rotary{};
  for (auto [argument, table] : {std::pair("rotary_cos", &cos), std::pair("rotary_sin", &sin)}) {
    check(table->dim() == 2, argument, ": ", table->dim(), " dimensions, wanted 2");
    check_shape(argument, *table, sizes(cos));
    check_type(argument, *table, cos.scalar_type());
    check_device(argument, *table, x);
  }
  const ScalarType statistics = statistics_type(x);
  check(cos.scalar_type() == x.scalar_type() || cos.scalar_type() == statistics, "rotary_cos: dtype ",
        name(cos.scalar_type()), ", wanted ", name(x.scalar_type()), " or ", name(statistics));
  check(2 * cos.size(1) <= x.size(3), "rotary_cos: ", cos.size(1), " columns, wanted at most half of head_dim, ",
        x.size(3));
  auto table_view = [](const Tensor& table) {
    return Tensor4{table.data_ptr(), 0, 0, table.stride(0), table.stride(1)};
  };
  rotary.dtype = *dtype_of(cos);
  rotary.cos = table_view(cos);
  rotary.sin = table_view(sin);
  rotary.positions = cos.size(0);
  rotary.pairs = cos.size(1);
  rotary.interleaved = interleaved;
  rotary.starts = starts;
  rotary.same_position = same_position;
  return rotary;
}

// A copy of the rows of `from` to `to`, a tensor of the same kind.
inline CopyRowsParams copy_params(const Tensor& from, const Tensor& to) {
  CopyRowsParams p{};
  p.dtype = p.rotary.dtype = *dtype_of(from);
  p.from = view(from);
  p.to = view(to);
  p.batch = from.size(0);
  p.heads = from.size(1);
  p.rows = from.size(2);
  p.dim = from.size(3);
  p.slots = to.size(0);
  p.slot_rows = to.size(2);
  return p;
}

// Checks the new rows, the cache that they are appended to, and where in it they belong. Returns where.
inline CopyRowsParams append_params(const Tensor& key_cache, const Tensor& value_cache, const Tensor& key,
                                    const Tensor& value, const Tensor& kv_lens, const OptionalTensor& block_table) {
  std::pair<const char*, const Tensor*> operands[] = {
      {"key", &key}, {"value", &value}, {"key_cache", &key_cache}, {"value_cache", &value_cache}};
  for (auto [argument, x] : operands) {
    check(x->dim() == 4, argument, ": ", x->dim(), " dimensions, wanted 4");
    check(x->scalar_type() == key.scalar_type(), argument, ": dtype ", name(x->scalar_type()), ", wanted that of key, ",
          name(key.scalar_type()));
    check_device(argument, *x, key);
  }
  std::optional<DType> dtype = dtype_of(key);
  check(dtype && *dtype != DType::boolean, "key: dtype ", name(key.scalar_type()),
        ", wanted float16, bfloat16, float32 or (on the CPU) float64");
  check_shape("value", value, {key.size(0), key.size(1), key.size(2), value.size(3)});
  check_shape("key_cache", key_cache, {key_cache.size(0), key.size(1), key_cache.size(2), key.size(3)});
  check_shape("value_cache", value_cache, {key_cache.size(0), key.size(1), key_cache.size(2), value.size(3)});
  for (auto [argument, x] : {operands[2], operands[3]})
    for (int64_t d = 0; d < 4; d++)
      check(x->stride(d) != 0 || x->size(d) <= 1, argument, ": axis ", d,
            " is expanded, wanted memory for each element");
  CopyRowsParams p = copy_params(key, key_cache);
  p.starts = int_vector("kv_lens", kv_lens, 1, key);
  check_shape("kv_lens", kv_lens, {p.batch});
  check(block_table || p.batch <= p.slots, "key_cache: batch ", p.slots, ", wanted at least that of key, ", p.batch);
  if (block_table) {
    p.block_table = int_vector("block_table", *block_table, 2, key);
    check(block_table->size(0) == p.batch, "block_table: ", block_table->size(0), " rows, wanted the batch, ", p.batch);
    p.block_table_row = block_table->stride(0);
    p.block_table_columns = block_table->size(1);
    const int64_t most = kUnbounded / max<int64_t>(p.slot_rows, 1);
    check(p.block_table_columns <= most, "block_table: ", p.block_table_columns, " columns, wanted at most ", most);
  }
  return p;
}

// Checks that rows have a place, and a position in the tables. The parameters are in host memory.
inline void check_places(const CopyRowsParams& p) {
  for (int64_t b = 0; p.rows > 0 && b < p.batch; b++) {
    const int64_t start = p.starts ? p.starts[b] : 0, most = p.capacity() - p.rows;
    check(most >= 0, p.block_table ? "block_table: " : "key_cache: ", p.capacity(),
          " keys per sequence, wanted at least the ", p.rows, " new ones");
    check(start >= 0 && start <= most, "kv_lens[", b, "]: ", start, ", wanted 0 to ", most,
          p.block_table ? ", so that the new keys fit into the block_table"
                        : ", so that the new keys fit into the cache");
    for (int64_t i = 0; p.block_table && i < p.rows; i = ((start + i) / p.slot_rows + 1) * p.slot_rows - start) {
      const RowPlace place = row_place(p, b, i);
      check(place.valid, "block_table[", b, ", ", (start + i) / p.slot_rows, "]: page ", place.slot, ", wanted 0 to ",
            p.slots - 1);
    }
  }
}
inline void check_positions(const Rotary& rotary, const char* argument, int64_t batch, int64_t rows) {
  for (int64_t b = 0; rotary.pairs > 0 && rows > 0 && b < batch; b++) {
    const int64_t last = rotary.same_position ? 0 : rows - 1;
    check(rotary_position(rotary, b, last) >= 0, argument, "[", b, "]: ", rotary.starts[b], ", wanted 0 to ",
          rotary.positions - last - 1, ", the positions that rotary_cos has");
  }
}

// The same vector in host memory; `copy` holds that memory.
inline IntVector host_vector(const Tensor& x, const IntVector& vector, OptionalTensor& copy) {
  if (x.is_cpu()) return vector;
  copy = torch::stable::to(x, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  return {copy->data_ptr(), copy->numel() ? copy->stride(copy->dim() - 1) : 0, vector.is_int64};
}

}  // namespace flashsoftmax
