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

// A vector over the query heads, or one per sequence; float or double as the statistics are. Absent where data is null.
struct HeadVector {
  const void* data = nullptr;
  int64_t stride = 0, batch = 0;

  template <class A> FLASHSOFTMAX_INLINE A at(int64_t h, int64_t b = 0) const {
    return static_cast<const A*>(data)[b * batch + h * stride];
  }
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
  IntVector q_lens;            // [sequences], absent: seqlen_q. Not in varlen
  IntVector kv_lens;           // [sequences], absent: seqlen_k
  IntVector kv_starts;         // [sequences], absent: 0
  IntVector cu_seqlens_q, cu_seqlens_k;  // [sequences + 1], varlen only; cu_seqlens_k not in pages
  IntVector block_table;                 // [sequences][block_table_row], paged only
  int64_t block_table_row = 0, page_size = 0, pages = 0;

  double scale, softcap;  // softcap 0: off
  Window window;
  bool has_q_offset;
  int64_t q_offset;
  HeadVector alibi_slopes, sinks;
  // Broadcast by strides of 0; dim is the key. Absent where data is null
  Tensor4 mask;  // bool
  Tensor4 bias;
  DType bias_dtype;
  int64_t split_size;         // keys per split
  int64_t decode_split_size;  // likewise, of sequences that take the decode kernel in a call for longer ones
  // Sequences of fewer or more queries are left to another kernel.
  int64_t least_q_len = 0, most_q_len = kUnbounded;

  FLASHSOFTMAX_INLINE int64_t group() const { return heads_q / heads_kv; }
  FLASHSOFTMAX_INLINE int64_t batch() const { return cu_seqlens_q ? 1 : sequences; }  // of query, out and lse

  // Whether scores or their visibility are looked up per element.
  FLASHSOFTMAX_INLINE bool has_mask() const { return mask.data || bias.data; }
  // Whether every score is scale * q.k: no softcap, ALiBi, bias or mask. Any other score feature belongs here too.
  FLASHSOFTMAX_INLINE bool plain_scores() const { return softcap == 0 && !alibi_slopes.data && !has_mask(); }
  // Whether a kernel may take q.k for the score and leave the scale to the exponential: m is then in units of scale. A
  // scale this large or small, or not positive, is multiplied into every score instead.
  FLASHSOFTMAX_INLINE bool scale_in_exp() const { return plain_scores() && scale > 1e-30 && scale < 1e30; }
};

// The score of query head h of sequence b.
template <class A> FLASHSOFTMAX_INLINE Score<A> score_of(const AttentionParams& p, int64_t b, int64_t h) {
  return {A(p.scale), A(p.softcap), p.alibi_slopes.data ? p.alibi_slopes.at<A>(h, b) : A(0)};
}

// Where one sequence lies in the tensors, and which keys its queries see. Keys are counted from the first one that is
// filled, so the kernels never meet those before it.
struct Sequence {
  int64_t index;
  int64_t q_batch, q_row, q_len, k_batch, k_row;
  int64_t first_key;  // key 0 is key first_key of mask, bias and pages
  Band band;
  // False if the lengths are impossible. The kernels check this because lengths in GPU memory are not checked earlier.
  // An invalid sequence has output NaN in its existing rows, and none of its keys is read.
  bool valid;
};

FLASHSOFTMAX_INLINE Sequence sequence(const AttentionParams& p, int64_t b) {
  Sequence s{b, b, 0, p.seqlen_q, b, 0, 0, {}, true};
  int64_t k_len = p.seqlen_k;
  if (p.cu_seqlens_q) {
    const int64_t end = p.cu_seqlens_q[b + 1];
    s.q_batch = s.k_batch = 0;
    s.q_row = p.cu_seqlens_q[b];
    s.q_len = end - s.q_row;
    s.valid = 0 <= s.q_row && s.q_row <= end && end <= p.rows_q && s.q_len <= p.seqlen_q;
    if (p.cu_seqlens_k) {
      const int64_t k_end = p.cu_seqlens_k[b + 1];
      s.k_row = p.cu_seqlens_k[b];
      k_len = k_end - s.k_row;
      s.valid = s.valid && 0 <= s.k_row && s.k_row <= k_end && k_end <= p.rows_k;
    }
    if (!s.valid) {
      s.q_row = min(max<int64_t>(s.q_row, 0), p.rows_q);
      s.q_len = min(max(end, s.q_row), p.rows_q) - s.q_row;
    }
  }
  if (p.q_lens) {
    s.q_len = p.q_lens[b];
    s.valid = 0 <= s.q_len && s.q_len <= p.seqlen_q;
  }
  const int64_t most = p.cu_seqlens_k ? k_len : p.seqlen_k;
  if (p.kv_lens) k_len = p.kv_lens[b];
  const int64_t first_key = p.kv_starts ? p.kv_starts[b] : 0;
  s.valid = s.valid && 0 <= k_len && k_len <= most && most <= p.seqlen_k && 0 <= first_key;
  if (!s.valid) {
    k_len = 0;
    if (p.q_lens) s.q_len = p.seqlen_q;
  }
  if (s.q_len < p.least_q_len || s.q_len > p.most_q_len) {
    s.q_len = k_len = 0;
    s.valid = true;
  }
  s.first_key = min(max<int64_t>(first_key, 0), k_len);
  s.k_row += s.first_key;
  const int64_t q_offset = p.has_q_offset ? p.q_offset : k_len - s.q_len;
  s.band = {q_offset - s.first_key, p.window, k_len - s.first_key};
  return s;
}

struct AttentionBackwardParams {
  AttentionParams forward;
  Tensor4 grad_out;  // absent where data is null
  Tensor4 grad_lse;  // [batch, heads_q, rows], float (double for f64); absent where data is null
  Tensor4 grad_query, grad_key, grad_value;
  Tensor4 grad_bias;  // [batch, heads_q, rows, keys], float (double for f64), zeroed; absent where data is null
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

// Rotary embedding: the first 2 * pairs elements of a row form pairs, and pair n of a row at position j is rotated by
// an angle whose cosine and sine are element n of row j of the tables.
struct Rotary {
  DType dtype;               // of the tables: that of the rows, or float (double for f64)
  Tensor4 cos, sin;          // [positions, pairs], by row and dim
  int64_t positions, pairs;  // no rotation if pairs is 0
  bool interleaved;          // pair n is elements 2n and 2n + 1, otherwise n and n + pairs
  IntVector starts;          // [batch], absent: 0. Row i of sequence b is at position starts[b] + i
  bool same_position;        // all rows of sequence b are at position starts[b]
};

// Copies rows to their places in a cache or in a new tensor, and rotates them on the way.
struct CopyRowsParams {
  DType dtype;
  Tensor4 from;  // [batch, heads, rows, dim]
  Tensor4 to;    // [slots, heads, slot_rows, dim]: a slot is a sequence, or a page if there is a block table
  int64_t batch, heads, rows, dim, slots, slot_rows;
  IntVector starts;       // [batch], absent: 0. Row i of sequence b goes to its place starts[b] + i
  IntVector block_table;  // [batch][block_table_row]: the pages of a sequence
  int64_t block_table_row, block_table_columns;
  Rotary rotary;

  // Places of a sequence.
  FLASHSOFTMAX_INLINE int64_t capacity() const { return block_table ? block_table_columns * slot_rows : slot_rows; }
};

// Where a row goes. Not valid if the rows of its sequence do not fit, or its page does not exist.
struct RowPlace {
  int64_t slot, row;
  bool valid;
};

FLASHSOFTMAX_INLINE RowPlace row_place(const CopyRowsParams& p, int64_t b, int64_t i) {
  const int64_t start = p.starts ? p.starts[b] : 0;
  if (start < 0 || start > p.capacity() - p.rows) return {0, 0, false};
  if (!p.block_table) return {b, start + i, true};
  const int64_t page = p.block_table.advanced(b * p.block_table_row)[(start + i) / p.slot_rows];
  return {page, (start + i) % p.slot_rows, 0 <= page && page < p.slots};
}

// The position of a row, or -1 if the tables do not have it.
FLASHSOFTMAX_INLINE int64_t rotary_position(const Rotary& rotary, int64_t b, int64_t i) {
  const int64_t start = rotary.starts ? rotary.starts[b] : 0, step = rotary.same_position ? 0 : i;
  return 0 <= start && start < rotary.positions - step ? start + step : -1;
}

}  // namespace flashsoftmax
