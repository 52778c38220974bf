// softmax.h, mask.h and dropout.h, called one function at a time from test_headers.py. As a .cu file it also holds a kernel.
#include "../csrc/params.h"

namespace flashsoftmax {

template <class N> struct Row {
  State<N> state;
  N a;
};

// One block of keys, folded in as a kernel does it: raise, rescale, accumulate.
template <class N> FLASHSOFTMAX_INLINE void add(Row<N>& row, const N* scores, const N* values, int64_t n) {
  N tile_max = N(kHidden);
  for (int64_t j = 0; j < n; ++j) tile_max = max(scores[j], tile_max);
  row.a *= raise(row.state, tile_max);
  for (int64_t j = 0; j < n; ++j) {
    N w = weight(scores[j], row.state.m);
    row.state.l += w;
    row.a += w * values[j];
  }
}

// n keys in blocks of this size: one after the other, or each on its own and merged.
template <class N>
FLASHSOFTMAX_INLINE void attend(const N* scores, const N* values, int64_t n, int64_t block, bool split, N* result) {
  Row<N> row{{}, N(0)};
  for (int64_t j = 0; j < n; j += block) {
    int64_t size = n - j < block ? n - j : block;
    if (split) {
      Row<N> part{{}, N(0)};
      add(part, scores + j, values + j, size);
      // As a decode split leaves it: (output, lse).
      part = {from_lse(lse(part.state)), part.a * inverse_sum(part.state)};
      Factors<N> factors = merge(row.state, part.state);
      row.a = row.a * factors.into + part.a * factors.from;
    } else {
      add(row, scores + j, values + j, size);
    }
  }
  result[0] = row.state.m;
  result[1] = row.state.l;
  result[2] = row.a * inverse_sum(row.state);
  result[3] = lse(row.state);
}

template <class N>
FLASHSOFTMAX_INLINE void score(N dot, N scale, N softcap, N slope, N distance, N bias, N* result) {
  Score<N> s{scale, softcap, slope};
  result[0] = s(s.content(dot), distance, bias);
  result[1] = s.content_slope(s.content(dot));
}

extern "C" {

void attend_float(const float* scores, const float* values, int64_t n, int64_t block, bool split, float* result) {
  attend(scores, values, n, block, split, result);
}
void attend_double(const double* scores, const double* values, int64_t n, int64_t block, bool split, double* result) {
  attend(scores, values, n, block, split, result);
}
void score_float(float dot, float scale, float softcap, float slope, float distance, float bias, float* result) {
  score(dot, scale, softcap, slope, distance, bias, result);
}
void score_double(double dot, double scale, double softcap, double slope, double distance, double bias,
                  double* result) {
  score(dot, scale, softcap, slope, distance, bias, result);
}

void words(const uint32_t* counter, const uint32_t* key, uint32_t* result) {
  uint64_t x[4];
  for (int n = 0; n < 4; n++) x[n] = uint64_t(0xabcdef) << 32 | counter[n];  // the high half may hold anything
  philox(x, key[0], key[1]);
  for (int n = 0; n < 4; n++) result[n] = uint32_t(x[n]);
}
uint32_t limit(double p) { return dropout_limit(p); }
uint32_t kept(int64_t seed, int64_t offset, int64_t batch, int64_t head, double p, uint32_t i, uint32_t j) {
  return kept_weights(seed, offset, batch, head, dropout_limit(p)).bits(i, j);
}

int verdict(int64_t i0, int64_t i1, int64_t j0, int64_t j1, int64_t q_offset, int64_t left, int64_t right,
            int64_t kv_len) {
  return static_cast<int>(Band{q_offset, {left, right}, kv_len}.verdict(i0, i1, j0, j1));
}
int64_t first(int64_t i, int64_t q_offset, int64_t left, int64_t right, int64_t kv_len) {
  return Band{q_offset, {left, right}, kv_len}.first(i);
}
int64_t end(int64_t i, int64_t q_offset, int64_t left, int64_t right, int64_t kv_len) {
  return Band{q_offset, {left, right}, kv_len}.end(i);
}
int64_t first_query(int64_t j0, int64_t q_offset, int64_t left, int64_t right, int64_t kv_len) {
  return Band{q_offset, {left, right}, kv_len}.first_query(j0);
}
int64_t end_query(int64_t j1, int64_t q_offset, int64_t left, int64_t right, int64_t kv_len) {
  return Band{q_offset, {left, right}, kv_len}.end_query(j1);
}
int verdict_of_map(const uint8_t* cells, int64_t heads, int64_t head, int64_t row, int64_t key, int64_t i0, int64_t i1,
                   int64_t j0, int64_t j1, int64_t q_offset, int64_t left, int64_t right, int64_t kv_len) {
  const MaskMap map{cells, nullptr, heads, head, row, key, 0, 0};
  return static_cast<int>(Visibility{{q_offset, {left, right}, kv_len}, map}.verdict(i0, i1, j0, j1));
}
int64_t cell_queries() { return kCellQueries; }
int64_t cell_keys() { return kCellKeys; }
int64_t unbounded() { return kUnbounded; }

}  // extern "C"

#ifdef __CUDACC__
template <class N> __global__ void on_device(AttentionParams p, const N* scores, int64_t n, N* out) {
  attend(scores, scores + n, n, 32, threadIdx.x % 2 == 0, out);
  score(out[0], N(p.scale), N(p.softcap), N(1), out[1], out[2], out);
  out[threadIdx.x] += N(kept_weights(p, blockIdx.x, 0).bits(threadIdx.x, 0));
  const Sequence s = sequence(p, blockIdx.x);
  out[threadIdx.x] += N(int(visibility(p, s, s.q_batch, 0).verdict(0, 16, 0, 64)));
}
template __global__ void on_device(AttentionParams, const float*, int64_t, float*);
template __global__ void on_device(AttentionParams, const double*, int64_t, double*);
#endif

}  // namespace flashsoftmax
