// Merge of states (out, lse) for disjoint keys, and its backward. A state whose lse is infinite is empty; its out is
// not read.
#pragma once

#include "pack.h"
#include "tasks.h"
#include "vec_math.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Merge {
  using A = Accumulate<T>;
  static constexpr int64_t kDims = 256;  // dimensions that are summed at a time

  const MergeParams& p;
  const int64_t rows = p.batch * p.heads * p.rows;

  struct Row {
    int64_t b, h, i;
  };
  Row row(int64_t r) const { return {r / p.rows / p.heads, r / p.rows % p.heads, r % p.rows}; }
  template <class U> static U* at_row(const Tensor4& x, Row r) { return at<U>(x, r.b, r.h, r.i); }
  State<A> state_of(int64_t n, Row r) const { return from_lse(*at_row<A>(p.inputs[n].lse, r)); }

 public:
  explicit Merge(const MergeParams& params) : p(params) {}

  void run(const Runner& runner) const {
    for_each_row(runner, rows, [&](int64_t r) { merge_row(row(r)); });
  }
  void run_backward(const MergeBackwardParams& params, const Runner& runner) const {
    for_each_row(runner, rows, [&](int64_t r) { merge_row_backward(params, row(r)); });
  }

 private:
  State<A> total_of(Row r) const {
    State<A> total;
    for (int64_t n = 0; n < p.states; n++) merge(total, state_of(n, r));
    return total;
  }
  // The share of a state in the merged output; 0 for an empty one.
  static A share_of(const State<A>& state, const State<A>& total) {
    return state.l == A(0) ? A(0) : weight(state.m, total.m) * inverse_sum(total);
  }

  void merge_row(Row r) const {
    const State<A> total = total_of(r);
    A acc[kDims];
    T* out = at_row<T>(p.output.out, r);
    for (int64_t d0 = 0; d0 < p.dim; d0 += kDims) {
      int64_t dims = min(kDims, p.dim - d0);
      std::fill(acc, acc + dims, A(0));
      for (int64_t n = 0; n < p.states; n++) {
        State<A> state = state_of(n, r);
        if (state.l == A(0)) continue;
        const A w = share_of(state, total);
        const Tensor4& out_n = p.inputs[n].out;
        const T* from = at_row<T>(out_n, r) + d0 * out_n.dim;
        for (int64_t d = 0; d < dims; d++) acc[d] += w * A(to_float(from[d * out_n.dim]));
      }
      narrow(acc, A(1), dims, out + d0 * p.output.out.dim, p.output.out.dim);
    }
    *at_row<A>(p.output.lse, r) = lse(total);
  }

  // With w_n = e^(lse_n - lse), the share of state n, and g_n = dout . out_n:
  //     dout_n = w_n dout,    dlse_n = w_n (g_n - sum_m w_m g_m + dlse).
  void merge_row_backward(const MergeBackwardParams& params, Row r) const {
    const Tensor4 &grad_out = params.grad_output.out, &grad_lse = params.grad_output.lse;
    const T* grad_out_row = grad_out.data ? at_row<T>(grad_out, r) : nullptr;
    const State<A> total = total_of(r);
    A mean = 0;
    for (int64_t n = 0; n < p.states; n++) {
      const Tensor4 &out_n = p.inputs[n].out, &grad_out_n = params.grad_inputs[n].out;
      const A w = share_of(state_of(n, r), total);
      const bool reads = grad_out_row && w != A(0);
      A g = 0;
      for (int64_t d = 0; d < p.dim; d++) {
        A grad_d = reads ? A(to_float(grad_out_row[d * grad_out.dim])) : A(0);
        if (reads) g += grad_d * A(to_float(at_row<T>(out_n, r)[d * out_n.dim]));
        at_row<T>(grad_out_n, r)[d * grad_out_n.dim] = from_float<T>(w * grad_d);
      }
      *at_row<A>(params.grad_inputs[n].lse, r) = g;
      mean += w * g;
    }
    const A grad_lse_row = grad_lse.data ? *at_row<A>(grad_lse, r) : A(0);
    for (int64_t n = 0; n < p.states; n++) {
      A& grad_lse_n = *at_row<A>(params.grad_inputs[n].lse, r);
      const A w = share_of(state_of(n, r), total);
      grad_lse_n = w == A(0) ? A(0) : w * (grad_lse_n - mean + grad_lse_row);
    }
  }
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
