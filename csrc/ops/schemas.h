// The schemas of the operators: their arguments' names, order and types.
#pragma once

#include <string>

namespace flashsoftmax {

// The arguments that attention and its backward have in common. Integers are SymInt, so that torch.compile and
// torch.export need not fix their values.
//     query [B, Hq, Sq, Dqk], key [B, Hkv, Sk, Dqk], value [B, Hkv, Sk, Dv]
//     varlen (cu_seqlens): B is 1, and the sequences are consecutive rows
//     paged (block_table): key and value are [pages, Hkv, page_size, D]
inline const std::string kOperands =
    "Tensor query, "
    "Tensor key, "
    "Tensor value, ";
inline const std::string kCommonArguments =
    "Tensor? attn_mask, "     // [B, Hq, Sq, Sk], bool; an axis of size 1 is broadcast
    "Tensor? attn_bias, "     // likewise, of a floating dtype
    "Tensor? alibi_slopes, "  // [Hq] or [B, Hq], float32 (float64 for float64), as sinks and lse
    "Tensor? sinks, "         // [Hq]
    "Tensor? kv_lens, "       // [B], or one per sequence
    "Tensor? kv_starts, "     // likewise
    "Tensor? q_lens, "        // [B], not in varlen
    "Tensor? cu_seqlens_q, "  // [sequences + 1]
    "Tensor? cu_seqlens_k, "
    "SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, "
    "float scale, "
    "float softcap, "
    "SymInt? window_left, "
    "SymInt? window_right, "
    "SymInt? q_offset, ";
// The seed of dropout is a tensor on the device of query, so that drawing it does not wait for a GPU.
inline const std::string kDropoutArguments =
    "float dropout_p, "
    "Tensor? dropout_seed";  // [2], int64: seed and offset. Wanted where dropout_p is not 0

template <class Library> void define_operators(Library& m) {
  auto define = [&](const std::string& schema) { m.def(schema.c_str()); };
  // lse + lse_error is m + ln l, more exactly than lse alone: the backward needs both.
  define("attention(" + kOperands + kCommonArguments +
         "Tensor? block_table, "  // [B, pages per sequence]
         "SymInt? split_size, "   // keys per split
         + kDropoutArguments + ") -> (Tensor out, Tensor lse, Tensor lse_error)");
  // Gradients that were not asked for, of attn_bias and sinks, are empty tensors.
  define("attention_backward(Tensor? grad_out, Tensor? grad_lse, " + kOperands +
         "Tensor out, "
         "Tensor lse, "
         "Tensor? lse_error, "  // absent: 0
         + kCommonArguments + kDropoutArguments +
         ", bool bias_grad"
         ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias, Tensor grad_sinks)");
  // outs [B, H, S, D] and lses [B, H, S], one of each per state
  define("merge(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");
  // Gradients are stacked on a leading axis of states.
  define(
      "merge_backward(Tensor? grad_out, Tensor? grad_lse, Tensor[] outs, Tensor[] lses)"
      " -> (Tensor grad_outs, Tensor grad_lses)");
  // Writes key [B, Hkv, Sn, D] and value [B, Hkv, Sn, Dv] into a cache [B or more, Hkv, Sk, D | Dv], or pages
  // [pages, Hkv, page_size, D | Dv] of a block table: row i of sequence b becomes its key kv_lens[b] + i. The key is
  // rotated by its position if there are tables of cosines and sines, [positions, pairs].
  define(
      "append_kv(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor kv_lens, "
      "Tensor? block_table, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved) -> ()");
  // query [B, H, S, D], rotated: row i of sequence b by position positions[b] + i, or positions[b] if same_position
  define(
      "rotary(Tensor query, Tensor rotary_cos, Tensor rotary_sin, Tensor positions, bool rotary_interleaved, "
      "bool same_position) -> Tensor");
}

}  // namespace flashsoftmax
