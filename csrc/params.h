// The parameters of the kernels: pointers, strides, sizes. No torch and no CUDA types.
#pragma once

#include <cstdint>

#include "mask.h"

namespace flashsoftmax {

enum class DType : int32_t { f16, bf16, f32, f64, boolean };

// A tensor of 4 dimensions (batch, head, row, dim). Strides are in elements and may be 0.
struct Tensor4 {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, dim = 0;

  FLASHSOFTMAX_INLINE int64_t offset(int64_t b, int64_t h, int64_t i) const { return b * batch + h * head + i * row; }
};

// A vector of int32 or int64.
struct IntVector {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_int64 = false;

  FLASHSOFTMAX_INLINE explicit operator bool() const { return data != nullptr; }
  // The vector that begins count elements of memory further on.
  FLASHSOFTMAX_INLINE IntVector advanced(int64_t count) const {
    return {static_cast<const char*>(data) + count * (is_int64 ? 8 : 4), stride, is_int64};
  }
  FLASHSOFTMAX_INLINE int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }
};

// A vector over the query heads, float or double as the statistics are; absent where data is null.
struct HeadVector {
  const void* data = nullptr;
  int64_t stride = 0;

  template <class A> FLASHSOFTMAX_INLINE A at(int64_t h) const { return static_cast<const A*>(data)[h * stride]; }
};

struct AttentionParams {
  DType dtype;
  // query, out [batch, heads_q, rows, head_dim | head_dim_v]; key, value [batch, heads_kv, rows, head_dim |
  // head_dim_v]. varlen: batch is 1, the sequences follow each other as rows. paged: key, value [pages, heads_kv,
  // page_size, ...].
  Tensor4 query, key, value, out;
  Tensor4 lse;        // [batch, heads_q, rows], float (double for f64)
  Tensor4 lse_error;  // likewise: m + ln l = lse + lse_error, for the backward. Absent where data is null

  int64_t sequences, heads_q, heads_kv, head_dim, head_dim_v;
  int64_t seqlen_q, seqlen_k;  // of a sequence: in varlen of the longest, in paged what the block table can hold
  int64_t rows_q;              // of query, out and lse
  int64_t rows_k;              // of key and value
  IntVector kv_lens;           // [sequences], absent: seqlen_k
  IntVector cu_seqlens_q, cu_seqlens_k;  // [sequences + 1], varlen only
  IntVector block_table;                 // [sequences][block_table_row], paged only
  int64_t block_table_row = 0, page_size = 0, pages = 0;

  double scale, softcap;  // softcap 0: off
  Window window;
  bool has_q_offset;
  int64_t q_offset;
  HeadVector alibi_slopes, sinks;
  Tensor4 mask;  // broadcast by strides of 0; dim is the key. Absent where data is null
  DType mask_dtype;
  // The map of the mask, in scratch memory: MaskMap. Rows are cells of queries, dims are cells of keys or keys.
  Tensor4 map_cells, map_bits;
  int64_t split_size;  // keys per split

  FLASHSOFTMAX_INLINE int64_t group() const { return heads_q / heads_kv; }
  FLASHSOFTMAX_INLINE int64_t batch() const { return cu_seqlens_q ? 1 : sequences; }  // of query, out and lse

  // Whether the mask is added to the scores; a bool mask only hides keys.
  FLASHSOFTMAX_INLINE bool has_bias() const { return mask.data && mask_dtype != DType::boolean; }
  // Whether every score is scale * q.k: no softcap, ALiBi or bias. Any other score feature belongs here too.
  FLASHSOFTMAX_INLINE bool plain_scores() const { return softcap == 0 && !alibi_slopes.data && !has_bias(); }
  // Whether a kernel may take q.k for the score and leave the scale to the exponential: m is then in units of scale. A
  // scale this large or small, or not positive, is multiplied into every score instead.
  FLASHSOFTMAX_INLINE bool scale_in_exp() const {
    return plain_scores() && !mask.data && scale > 1e-30 && scale < 1e30;
  }
};

// The score of query head h.
template <class A> FLASHSOFTMAX_INLINE Score<A> score_of(const AttentionParams& p, int64_t h) {
  return {A(p.scale), A(p.softcap), p.alibi_slopes.data ? p.alibi_slopes.at<A>(h) : A(0)};
}

// Where one sequence lies in the tensors, and which keys its queries see.
struct Sequence {
  int64_t q_batch, q_row, q_len, k_batch, k_row;
  Band band;
  // False if the lengths are impossible. The kernels check this because lengths in GPU memory are not checked earlier.
  // An invalid sequence has output NaN in its existing rows, and none of its keys is read.
  bool valid;
};

FLASHSOFTMAX_INLINE Sequence sequence(const AttentionParams& p, int64_t b) {
  Sequence s{b, 0, p.seqlen_q, b, 0, {}, true};
  int64_t k_len = p.seqlen_k;
  if (p.cu_seqlens_q) {
    const int64_t end = p.cu_seqlens_q[b + 1], k_end = p.cu_seqlens_k[b + 1];
    s.q_batch = s.k_batch = 0;
    s.q_row = p.cu_seqlens_q[b];
    s.q_len = end - s.q_row;
    s.k_row = p.cu_seqlens_k[b];
    k_len = k_end - s.k_row;
    s.valid = 0 <= s.q_row && s.q_row <= end && end <= p.rows_q && s.q_len <= p.seqlen_q && 0 <= s.k_row &&
              s.k_row <= k_end && k_end <= p.rows_k;
    if (!s.valid) {
      s.q_row = min(max<int64_t>(s.q_row, 0), p.rows_q);
      s.q_len = min(max(end, s.q_row), p.rows_q) - s.q_row;
    }
  }
  const int64_t most = p.cu_seqlens_k ? k_len : p.seqlen_k;
  if (p.kv_lens) k_len = p.kv_lens[b];
  s.valid = s.valid && 0 <= k_len && k_len <= most && most <= p.seqlen_k;
  if (!s.valid) k_len = 0;
  s.band = {p.has_q_offset ? p.q_offset : k_len - s.q_len, p.window, k_len};
  return s;
}

// The sizes of the map of the mask: axes along which the mask is broadcast have size 1.
struct MapShape {
  int64_t batch, heads, queries, keys;  // of the mask
  int64_t query_cells, key_cells;
  int64_t words;  // of bits

  FLASHSOFTMAX_INLINE explicit MapShape(const AttentionParams& p)
      : batch(p.mask.batch ? p.sequences : 1),
        heads(p.mask.head ? p.heads_q : 1),
        queries(p.mask.row ? p.rows_q : 1),
        keys(p.mask.dim ? p.seqlen_k : 1),
        query_cells((queries + kCellQueries - 1) / kCellQueries),
        key_cells((keys + kCellKeys - 1) / kCellKeys),
        words(p.has_bias() ? 0 : cells() * kCellKeys) {}
  FLASHSOFTMAX_INLINE int64_t cells() const { return batch * heads * query_cells * key_cells; }
};

// The bytes of the map of the mask: first its bits, then its cells. 0 if there is no mask, or no key that it hides.
FLASHSOFTMAX_INLINE int64_t map_bytes(const AttentionParams& p) {
  if (!p.mask.data || p.seqlen_k == 0) return 0;
  const MapShape shape(p);
  return (shape.words * int64_t(sizeof(uint16_t)) + shape.cells() + 63) / 64 * 64;
}
// Places the map, still to be made, in map_bytes(p) bytes of memory.
FLASHSOFTMAX_INLINE void place_map(AttentionParams& p, void* memory) {
  const MapShape shape(p);
  const auto placed = [&](void* data, int64_t per_row, int64_t per_key) {
    const int64_t plane = shape.query_cells * per_row;
    return Tensor4{data, p.mask.batch ? shape.heads * plane : 0, p.mask.head ? plane : 0, p.mask.row ? per_row : 0,
                   p.mask.dim ? per_key : 0};
  };
  if (shape.words) p.map_bits = placed(memory, shape.key_cells * kCellKeys, 1);
  p.map_cells = placed(static_cast<uint16_t*>(memory) + shape.words, shape.key_cells, 1);
}

// What query heads [h, h + heads) of sequence b see.
FLASHSOFTMAX_INLINE Visibility visibility(const AttentionParams& p, const Sequence& s, int64_t b, int64_t h,
                                          int64_t heads = 1) {
  Visibility seen{s.band, {}};
  const Tensor4 &cells = p.map_cells, &bits = p.map_bits;
  if (cells.data)
    seen.map = {static_cast<const uint8_t*>(cells.data) + cells.offset(b, h, 0),
                bits.data ? static_cast<const uint16_t*>(bits.data) + bits.offset(b, h, 0) : nullptr,
                cells.head ? heads : 1,
                cells.head,
                cells.row,
                cells.dim,
                bits.row,
                bits.dim};
  return seen;
}

struct AttentionBackwardParams {
  AttentionParams forward;
  Tensor4 grad_out;  // absent where data is null
  Tensor4 grad_lse;  // [batch, heads_q, rows], float (double for f64); absent where data is null
  Tensor4 grad_query, grad_key, grad_value;
  Tensor4 grad_mask;  // [batch, heads_q, rows, keys], float (double for f64), zeroed; absent where data is null
  void* grad_sinks;   // [heads_q], float (double for f64); may be null
};

// Merge of states (out, lse) for disjoint keys, all of the same shape.
struct MergeState {
  Tensor4 out;  // [batch, heads, rows, dim]
  Tensor4 lse;  // [batch, heads, rows], float (double for f64)
};

struct MergeParams {
  DType dtype;
  int64_t batch, heads, rows, dim, states;
  const MergeState* inputs;  // [states]
  MergeState output;
};

struct MergeBackwardParams {
  MergeParams forward;            // its output is absent
  MergeState grad_output;         // either may be absent
  const MergeState* grad_inputs;  // [states]
};

}  // namespace flashsoftmax
