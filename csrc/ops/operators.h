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

// Device::attention(params, like), and likewise the others, runs a kernel on checked parameters, on the device of like.
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
    Tensor grad_bias = torch::stable::new_zeros(lse, bias_grad ? sizes(*attn_bias) : std::vector<int64_t>{0});
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

  template <class Library> static void implement(Library& m) {
    m.impl("attention", TORCH_BOX(&attention));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
    m.impl("merge", TORCH_BOX(&merge));
    m.impl("merge_backward", TORCH_BOX(&merge_backward));
  }
};

}  // namespace flashsoftmax
