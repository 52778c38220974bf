// The operators, for any device: they check, allocate and run a kernel of the device.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
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
    return forward(
        {query,       key,          value,        attn_mask,    attn_bias,    alibi_slopes, sinks,       kv_lens,
         kv_starts,   q_lens,       cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale,       softcap,
         window_left, window_right, q_offset,     block_table,  split_size,   dropout_p,    dropout_seed},
        std::nullopt, std::nullopt);
  }

  static void attention_out(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& key,
                            const Tensor& value, const OptionalTensor& attn_mask, const OptionalTensor& attn_bias,
                            const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                            const OptionalTensor& kv_lens, const OptionalTensor& kv_starts,
                            const OptionalTensor& q_lens, const OptionalTensor& cu_seqlens_q,
                            const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                            double scale, double softcap, OptionalInt window_left, OptionalInt window_right,
                            OptionalInt q_offset, const OptionalTensor& block_table, OptionalInt split_size,
                            double dropout_p, const OptionalTensor& dropout_seed) {
    forward({query,       key,          value,        attn_mask,    attn_bias,    alibi_slopes, sinks,       kv_lens,
             kv_starts,   q_lens,       cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale,       softcap,
             window_left, window_right, q_offset,     block_table,  split_size,   dropout_p,    dropout_seed},
            out, lse);
  }

  // (out, lse, lse_error). Allocates out and lse unless they are given.
  static std::tuple<Tensor, Tensor, Tensor> forward(const AttentionArguments& a, OptionalTensor out,
                                                    OptionalTensor lse) {
    const Tensor& query = a.query;
    const bool reads_lengths = Device::reads_lengths(query);
    AttentionParams p = attention_params(a, reads_lengths);
    // Rows that no sequence has are not written: those after the last sequence, or beyond q_lens.
    const bool some_unwritten = a.q_lens || (!reads_lengths && a.cu_seqlens_q);
    const std::vector<int64_t> rows{query.size(0), query.size(1), query.size(2)};
    auto statistics = [&] { return torch::stable::new_empty(query, rows, statistics_type(query)); };
    Tensor lse_error = statistics();
    if (out) {
      check_output("out", *out, {rows[0], rows[1], rows[2], p.head_dim_v}, query.scalar_type(), query);
      check_output("lse", *lse, rows, statistics_type(query), query);
      if (some_unwritten) torch::stable::zero_(*out);
    } else {
      out = empty_like_layout(query, p.head_dim_v, some_unwritten);
      lse = statistics();
    }
    if (some_unwritten) torch::stable::fill_(*lse, kHidden);
    if (some_unwritten) torch::stable::zero_(lse_error);
    p.out = view(*out);
    p.lse = view(*lse);
    p.lse_error = view(lse_error);
    if (lse->numel() > 0) Device::attention(p, query);
    return {*out, *lse, lse_error};
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
    const AttentionArguments a{query,        key,          value,        attn_mask, attn_bias,    alibi_slopes,
                               sinks,        kv_lens,      kv_starts,    q_lens,    cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k, scale,        softcap,   window_left,  window_right,
                               q_offset,     std::nullopt, std::nullopt, dropout_p, dropout_seed};
    return backward(a, grad_out, grad_lse, out, lse, lse_error, bias_grad, std::nullopt);
  }

  static std::tuple<Tensor, Tensor> attention_backward_out(
      const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value, const OptionalTensor& grad_out,
      const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
      const Tensor& lse, const OptionalTensor& lse_error, const OptionalTensor& attn_mask,
      const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
      const OptionalTensor& kv_lens, const OptionalTensor& kv_starts, const OptionalTensor& q_lens,
      const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q,
      int64_t max_seqlen_k, double scale, double softcap, OptionalInt window_left, OptionalInt window_right,
      OptionalInt q_offset, double dropout_p, const OptionalTensor& dropout_seed, bool bias_grad) {
    const AttentionArguments a{query,        key,          value,        attn_mask, attn_bias,    alibi_slopes,
                               sinks,        kv_lens,      kv_starts,    q_lens,    cu_seqlens_q, cu_seqlens_k,
                               max_seqlen_q, max_seqlen_k, scale,        softcap,   window_left,  window_right,
                               q_offset,     std::nullopt, std::nullopt, dropout_p, dropout_seed};
    auto grads = backward(a, grad_out, grad_lse, out, lse, lse_error, bias_grad, {{grad_query, grad_key, grad_value}});
    return {std::get<3>(grads), std::get<4>(grads)};
  }

  // The gradients of query, key, value, attn_bias and sinks. Allocates the first three unless they are given.
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      const AttentionArguments& a, const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
      const Tensor& lse, const OptionalTensor& lse_error, bool bias_grad,
      const std::optional<std::array<Tensor, 3>>& given) {
    const Tensor& query = a.query;
    AttentionBackwardParams grad{};
    const bool reads_lengths = Device::reads_lengths(query);
    grad.forward = attention_params(a, reads_lengths);
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
    check(!bias_grad || a.attn_bias, "bias_grad: True without attn_bias, wanted False");

    const bool some_unwritten = a.q_lens || (!reads_lengths && a.cu_seqlens_q);
    auto gradient = [&](int64_t n, const char* argument, const Tensor& x, bool zero) {
      if (!given) return empty_like_layout(x, x.size(3), zero);
      const Tensor& to = (*given)[n];
      check_output(argument, to, sizes(x), query.scalar_type(), query);
      return zero ? torch::stable::zero_(const_cast<Tensor&>(to)) : to;
    };
    Tensor grad_query = gradient(0, "grad_query", query, some_unwritten);
    Tensor grad_key = gradient(1, "grad_key", a.key, /*zero=*/true);
    Tensor grad_value = gradient(2, "grad_value", a.value, /*zero=*/true);
    Tensor grad_bias = torch::stable::new_zeros(lse, bias_grad ? sizes(*a.attn_bias) : std::vector<int64_t>{0});
    Tensor grad_sinks = torch::stable::new_zeros(lse, {a.sinks ? p.heads_q : 0});

    p.out = view(out);
    p.lse = view(lse);
    if (lse_error) p.lse_error = view(*lse_error);
    if (grad_out) grad.grad_out = view(*grad_out);
    if (grad_lse) grad.grad_lse = view(*grad_lse);
    grad.grad_query = view(grad_query);
    grad.grad_key = view(grad_key);
    grad.grad_value = view(grad_value);
    if (bias_grad) grad.grad_bias = broadcast_view(grad_bias);
    if (a.sinks) grad.grad_sinks = grad_sinks.data_ptr();
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
    m.impl("attention_out", TORCH_BOX(&attention_out));
    m.impl("attention_backward_out", TORCH_BOX(&attention_backward_out));
    m.impl("merge", TORCH_BOX(&merge));
    m.impl("merge_backward", TORCH_BOX(&merge_backward));
    m.impl("append_kv", TORCH_BOX(&append_kv));
    m.impl("rotary", TORCH_BOX(&rotary));
  }
};

}  // namespace flashsoftmax
