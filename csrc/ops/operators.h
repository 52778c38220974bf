// The operators, for any device: they check, allocate and run a kernel of the device.
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "parameters.h"
#include "schemas.h"

namespace flashsoftmax {

// Scratch memory on the device of `like`.
inline Tensor scratch(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

// x, summed over the axes in which `shape` has the size 1.
inline Tensor summed_to(const Tensor& x, const std::vector<int64_t>& shape) {
  std::vector<int64_t> axes;
  for (int64_t d = 0; d < x.dim(); d++)
    if (shape[d] == 1 && x.size(d) != 1) axes.push_back(d);
  return axes.empty() ? x : torch::stable::sum(x, torch::headeronly::IntHeaderOnlyArrayRef(axes), /*keepdim=*/true);
}

// Device::attention(params, like), and likewise the others, runs a kernel on checked parameters, on the device of like.
// Device::kSumsGradBias: the backward sums the gradient of a bias over its broadcast axes; otherwise it writes one
// gradient per score.
// Device::reads_lengths(like): the values of lengths are checked here; otherwise the kernels check them.
template <class Device> struct Operators {
  static std::tuple<Tensor, Tensor, Tensor> attention(
      const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
      const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
      const OptionalTensor& kv_lens, const OptionalTensor& kv_starts, const OptionalTensor& q_lens,
      const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
      int64_t max_seqlen_k, double scale, double softcap, OptionalInt window_left, OptionalInt window_right,
      OptionalInt q_offset, const OptionalTensor& block_table, OptionalInt split_size, double dropout_p,
      const OptionalTensor& dropout_seed) {
    const bool reads_lengths = Device::reads_lengths(query);
    AttentionParams p = attention_params(
        {query,       key,          value,        attn_mask,    attn_bias,    alibi_slopes, sinks,       kv_lens,
         kv_starts,   q_lens,       cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale,       softcap,
         window_left, window_right, q_offset,     block_table,  split_size,   dropout_p,    dropout_seed},
        reads_lengths);
    // Rows that no sequence has are not written: those after the last sequence, or beyond q_lens.
    const bool some_unwritten = q_lens || (!reads_lengths && cu_seqlens_q);
    Tensor out = empty_like_layout(query, p.head_dim_v, some_unwritten);
    auto statistics = [&] {
      return torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, statistics_type(query));
    };
    Tensor lse = statistics(), lse_error = statistics();
    if (some_unwritten) torch::stable::fill_(lse, kHidden);
    if (some_unwritten) torch::stable::zero_(lse_error);
    p.out = view(out);
    p.lse = view(lse);
    p.lse_error = view(lse_error);
    if (lse.numel() > 0) Device::attention(p, query);
    return {out, lse, lse_error};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
      const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& lse_error,
      const OptionalTensor& attn_mask, const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
      const OptionalTensor& sinks, const OptionalTensor& kv_lens, const OptionalTensor& kv_starts,
      const OptionalTensor& q_lens, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
      int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, OptionalInt window_left,
      OptionalInt window_right, OptionalInt q_offset, double dropout_p, const OptionalTensor& dropout_seed,
      bool bias_grad) {
    AttentionBackwardParams grad{};
    const bool reads_lengths = Device::reads_lengths(query);
    grad.forward = attention_params(
        {query,       key,          value,        attn_mask,    attn_bias,    alibi_slopes, sinks,       kv_lens,
         kv_starts,   q_lens,       cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale,       softcap,
         window_left, window_right, q_offset,     std::nullopt, std::nullopt, dropout_p,    dropout_seed},
        reads_lengths);
    AttentionParams& p = grad.forward;
    const std::vector<int64_t> rows{query.size(0), query.size(1), query.size(2)};
    std::vector<int64_t> out_shape = rows;
    out_shape.push_back(p.head_dim_v);
    check_like("out", out, out_shape, query);
    check_shape("lse", lse, rows);
    check_type("lse", lse, statistics_type(query));
    check_device("lse", lse, query);
    if (lse_error) check_like("lse_error", *lse_error, rows, lse);
    if (grad_out) check_like("grad_out", *grad_out, out_shape, query);
    if (grad_lse) check_like("grad_lse", *grad_lse, rows, lse);
    check(!bias_grad || attn_bias, "bias_grad: True without attn_bias, wanted False");

    const bool some_unwritten = q_lens || (!reads_lengths && cu_seqlens_q);
    Tensor grad_query = empty_like_layout(query, p.head_dim, some_unwritten);
    Tensor grad_key = empty_like_layout(key, p.head_dim, /*zero=*/true);
    Tensor grad_value = empty_like_layout(value, p.head_dim_v, /*zero=*/true);
    std::vector<int64_t> bias_shape{0};
    if (bias_grad) bias_shape = Device::kSumsGradBias ? sizes(*attn_bias) : scores_shape(p);
    Tensor grad_bias = torch::stable::new_zeros(lse, bias_shape);
    Tensor grad_sinks = torch::stable::new_zeros(lse, {sinks ? p.heads_q : 0});

    p.out = view(out);
    p.lse = view(lse);
    if (lse_error) p.lse_error = view(*lse_error);
    if (grad_out) grad.grad_out = view(*grad_out);
    if (grad_lse) grad.grad_lse = view(*grad_lse);
    grad.grad_query = view(grad_query);
    grad.grad_key = view(grad_key);
    grad.grad_value = view(grad_value);
    if (bias_grad) grad.grad_bias = broadcast_view(grad_bias);
    if (sinks) grad.grad_sinks = grad_sinks.data_ptr();
    if (lse.numel() > 0) Device::attention_backward(grad, query);
    if (bias_grad && !Device::kSumsGradBias) grad_bias = summed_to(grad_bias, sizes(*attn_bias));
    return {grad_query, grad_key, grad_value, grad_bias, grad_sinks};
  }

  static std::tuple<Tensor, Tensor> merge(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
    std::vector<MergeState> inputs = merge_inputs(outs, lses);
    Tensor out = empty_like_layout(outs[0], outs[0].size(3));
    Tensor lse = torch::stable::new_empty(lses[0], sizes(lses[0]));
    MergeParams params = merge_params(inputs, outs[0], merge_state(out, lse));
    if (lse.numel() > 0) Device::merge(params, lse);
    return {out, lse};
  }

  static std::tuple<Tensor, Tensor> merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                                   const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
    std::vector<MergeState> inputs = merge_inputs(outs, lses);
    if (grad_out) check_like("grad_out", *grad_out, sizes(outs[0]), outs[0]);
    if (grad_lse) check_like("grad_lse", *grad_lse, sizes(lses[0]), lses[0]);
    const int64_t states = outs.size();
    auto stacked = [&](const Tensor& x) {
      std::vector<int64_t> shape = sizes(x);
      shape.insert(shape.begin(), states);
      return torch::stable::new_empty(x, shape);
    };
    Tensor grad_outs = stacked(outs[0]), grad_lses = stacked(lses[0]);
    std::vector<MergeState> grad_inputs;
    for (int64_t n = 0; n < states; n++)
      grad_inputs.push_back(
          merge_state(torch::stable::select(grad_outs, 0, n), torch::stable::select(grad_lses, 0, n)));
    MergeBackwardParams params{merge_params(inputs, outs[0], {}),
                               {grad_out ? view(*grad_out) : Tensor4{}, grad_lse ? view(*grad_lse) : Tensor4{}},
                               grad_inputs.data()};
    if (lses[0].numel() > 0) Device::merge_backward(params, lses[0]);
    return {grad_outs, grad_lses};
  }

  static void append_kv(const Tensor& key_cache, const Tensor& value_cache, const Tensor& key, const Tensor& value,
                        const Tensor& kv_lens, const OptionalTensor& block_table, const OptionalTensor& rotary_cos,
                        const OptionalTensor& rotary_sin, bool rotary_interleaved) {
    CopyRowsParams keys = append_params(key_cache, value_cache, key, value, kv_lens, block_table);
    CopyRowsParams values = keys;
    check(rotary_cos.has_value() == rotary_sin.has_value(),
          "rotary_cos, rotary_sin: one of them is missing, wanted both");
    if (rotary_cos) keys.rotary = rotary_params(key, *rotary_cos, *rotary_sin, keys.starts, rotary_interleaved, false);
    values.from = view(value);
    values.to = view(value_cache);
    values.dim = value.size(3);
    if (Device::reads_lengths(key)) {
      CopyRowsParams host = keys;
      OptionalTensor lens_copy, table_copy;
      host.starts = host.rotary.starts = host_vector(kv_lens, keys.starts, lens_copy);
      if (block_table) host.block_table = host_vector(*block_table, keys.block_table, table_copy);
      if (table_copy) host.block_table_row = table_copy->stride(0);
      check_places(host);
      check_positions(host.rotary, "kv_lens", host.batch, host.rows);
    }
    if (key.numel() > 0) Device::copy_rows(keys, key);
    if (value.numel() > 0) Device::copy_rows(values, value);
  }

  static Tensor rotary(const Tensor& query, const Tensor& rotary_cos, const Tensor& rotary_sin, const Tensor& positions,
                       bool rotary_interleaved, bool same_position) {
    check(query.dim() == 4, "query: ", query.dim(), " dimensions, wanted 4");
    std::optional<DType> dtype = dtype_of(query);
    check(dtype && *dtype != DType::boolean, "query: dtype ", name(query.scalar_type()),
          ", wanted float16, bfloat16, float32 or (on the CPU) float64");
    const IntVector starts = int_vector("positions", positions, 1, query);
    check_shape("positions", positions, {query.size(0)});
    Tensor out = empty_like_layout(query, query.size(3));
    CopyRowsParams p = copy_params(query, out);
    p.rotary = rotary_params(query, rotary_cos, rotary_sin, starts, rotary_interleaved, same_position);
    if (Device::reads_lengths(query)) {
      Rotary host = p.rotary;
      OptionalTensor copy;
      host.starts = host_vector(positions, starts, copy);
      check_positions(host, "positions", p.batch, p.rows);
    }
    if (query.numel() > 0) Device::copy_rows(p, query);
    return out;
  }

  template <class Library> static void implement(Library& m) {
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
    m.impl("merge", TORCH_BOX(&merge));
    m.impl("merge_backward", TORCH_BOX(&merge_backward));
    m.impl("append_kv", TORCH_BOX(&append_kv));
    m.impl("rotary", TORCH_BOX(&rotary));
  }
};

}  // namespace flashsoftmax
