// The operators' schemas, and their CPU registration.
#include "ops.h"

#include <atomic>

namespace flashsoftmax {
namespace {

// torch's own threads, each taking the next task as it gets free.
Runner torch_runner() {
  const int64_t workers = torch::stable::get_num_threads();
  auto run = [workers](int64_t count, const std::function<void(int64_t, int64_t)>& task) {
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(workers, count), 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; worker++)
        for (int64_t index; (index = next.fetch_add(1)) < count;) task(worker, index);
    });
  };
  return {workers, run};
}

Tensor scratch(const Tensor& like, int64_t bytes) { return torch::stable::new_empty(like, {bytes}, ScalarType::Byte); }

std::tuple<Tensor, Tensor> attention_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const OptionalTensor& attn_mask, const OptionalTensor& alibi_slopes,
                                         const OptionalTensor& sinks, const OptionalTensor& kv_lens,
                                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                         const OptionalTensor& block_table, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                         double scale, double softcap, OptionalInt window_left,
                                         OptionalInt window_right, OptionalInt q_offset, OptionalInt split_size) {
  AttentionParams p = attention_params(
      query, key, value, attn_mask, alibi_slopes, sinks, {kv_lens, cu_seqlens_q, cu_seqlens_k, block_table},
      {max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right, q_offset, split_size});
  Tensor out = empty_like_layout(query, p.head_dim_v);
  Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)}, statistics_type(query));
  p.out = view(out);
  p.lse = view(lse);
  if (lse.numel() == 0) return {out, lse};
  const Runner runner = torch_runner();
  Tensor memory = scratch(query, cpu_kernels().attention_scratch(p, runner.workers));
  cpu_kernels().attention(p, memory.data_ptr(), runner);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward_cpu(
    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const OptionalTensor& attn_mask,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks, const OptionalTensor& kv_lens,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, double softcap, OptionalInt window_left, OptionalInt window_right, OptionalInt q_offset,
    bool mask_grad) {
  AttentionGradParams grad{};
  grad.forward = attention_params(
      query, key, value, attn_mask, alibi_slopes, sinks, {kv_lens, cu_seqlens_q, cu_seqlens_k, std::nullopt},
      {max_seqlen_q, max_seqlen_k, scale, softcap, window_left, window_right, q_offset, std::nullopt});
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

  Tensor grad_query = empty_like_layout(query, p.head_dim);
  Tensor grad_key = empty_like_layout(key, p.head_dim, /*zero=*/true);
  Tensor grad_value = empty_like_layout(value, p.head_dim_v, /*zero=*/true);
  Tensor grad_mask = torch::stable::new_zeros(lse, mask_grad ? sizes(*attn_mask) : std::vector<int64_t>{0});
  Tensor grad_sinks = torch::stable::new_zeros(lse, {sinks ? p.heads_q : 0});
  if (lse.numel() == 0) return {grad_query, grad_key, grad_value, grad_mask, grad_sinks};

  p.out = view(out);
  p.lse = view(lse);
  if (grad_out) grad.grad_out = view(*grad_out);
  if (grad_lse) grad.grad_lse = view(*grad_lse);
  grad.grad_query = view(grad_query);
  grad.grad_key = view(grad_key);
  grad.grad_value = view(grad_value);
  if (mask_grad) grad.grad_mask = view(grad_mask);
  if (sinks) grad.grad_sinks = grad_sinks.data_ptr();
  const Runner runner = torch_runner();
  Tensor memory = scratch(query, cpu_kernels().attention_grad_scratch(grad, runner.workers));
  cpu_kernels().attention_grad(grad, memory.data_ptr(), runner);
  return {grad_query, grad_key, grad_value, grad_mask, grad_sinks};
}

std::tuple<Tensor, Tensor> merge_cpu(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
  return merge_on(outs, lses, [](const MergeParams& p) { cpu_kernels().merge(p, torch_runner()); });
}

std::tuple<Tensor, Tensor> merge_backward_cpu(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                              const std::vector<Tensor>& outs, const std::vector<Tensor>& lses,
                                              const Tensor& lse) {
  return merge_backward_on(grad_out, grad_lse, outs, lses, lse,
                           [](const MergeGradParams& p) { cpu_kernels().merge_grad(p, torch_runner()); });
}

std::string cpu_isa() { return cpu_kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY(flashsoftmax, m) {
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
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention_cpu));
  m.impl("attention_backward", TORCH_BOX(&attention_backward_cpu));
  m.impl("merge", TORCH_BOX(&merge_cpu));
  m.impl("merge_backward", TORCH_BOX(&merge_backward_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(flashsoftmax, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&cpu_isa)); }

}  // namespace flashsoftmax
