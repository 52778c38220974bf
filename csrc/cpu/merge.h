// Merge of states (out, lse) for disjoint keys, and its backward. A state whose lse is infinite is empty and not read.
#pragma once

#include "tile.h"

namespace flashsoftmax::FLASHSOFTMAX_ISA {

template <class T> class Merge {
  using A = Accumulate<T>;
  const MergeParams& p;

  struct Row {
    int64_t b, h, i;
  };
  // f for every row, on all workers
  template <class F> void each_row(const Runner& runner, F f) const {
    constexpr int64_t chunk = 64;  // rows a task
    int64_t rows = p.batch * p.heads * p.rows;
    runner.run(ceil_div(rows, chunk), [&](int64_t, int64_t index) {
      for (int64_t r = index * chunk; r < min(rows, (index + 1) * chunk); r++)
        f(Row{r / p.rows / p.heads, r / p.rows % p.heads, r % p.rows});
    });
  }
  template <class U> static U* at_row(const Tensor4& x, Row r) { return at<U>(x, r.b, r.h, r.i); }
  static State<A> state_of(const MergeState& state, Row r) { return from_lse(*at_row<A>(state.lse, r)); }

 public:
  explicit Merge(const MergeParams& params) : p(params) {}

  void run(const Runner& runner) const {
    each_row(runner, [&](Row r) {
      State<A> total;
      for (int64_t n = 0; n < p.states; n++) merge(total, state_of(p.inputs[n], r));
      const A normalizer = inverse_sum(total);
      A acc[kMaxMergeDim];
      T* out = at_row<T>(p.output.out, r);
      for (int64_t d0 = 0; d0 < p.dim; d0 += kMaxMergeDim) {
        int64_t dims = min(kMaxMergeDim, p.dim - d0);
        std::fill(acc, acc + dims, A(0));
        for (int64_t n = 0; n < p.states; n++) {
          State<A> state = state_of(p.inputs[n], r);
          if (state.l == A(0)) continue;
          const A factor = weight(state.m, total.m) * normalizer;
          const T* from = at_row<T>(p.inputs[n].out, r) + d0 * p.inputs[n].out.dim;
          for (int64_t d = 0; d < dims; d++) acc[d] += factor * A(to_float(from[d * p.inputs[n].out.dim]));
        }
        narrow(acc, A(1), dims, out + d0 * p.output.out.dim, p.output.out.dim);
      }
      *at_row<A>(p.output.lse, r) = lse(total);
    });
  }

  // With w_n = e^(lse_n - lse) and g_n = dout . out_n:
  //     dout_n = w_n dout,    dlse_n = w_n (g_n - sum_m w_m g_m + dlse).
  void run_grad(const MergeGradParams& grad, const Runner& runner) const {
    each_row(runner, [&](Row r) {
      const MergeState& grad_output = grad.grad_output;
      const T* grad_out = grad_output.out.data ? at_row<T>(grad_output.out, r) : nullptr;
      State<A> total;
      for (int64_t n = 0; n < p.states; n++) merge(total, state_of(p.inputs[n], r));
      const A normalizer = inverse_sum(total);
      auto weight_of = [&](int64_t n) {
        State<A> state = state_of(p.inputs[n], r);
        return state.l == A(0) ? A(0) : weight(state.m, total.m) * normalizer;
      };
      A mean = 0;
      for (int64_t n = 0; n < p.states; n++) {
        const Tensor4 &out = p.inputs[n].out, &grad_out_n = grad.grad_inputs[n].out;
        const A w = weight_of(n);
        const bool reads = grad_out && w != A(0);
        A g = 0;
        for (int64_t d = 0; d < p.dim; d++) {
          A grad_d = reads ? A(to_float(grad_out[d * grad_output.out.dim])) : A(0);
          if (reads) g += grad_d * A(to_float(at_row<T>(out, r)[d * out.dim]));
          at_row<T>(grad_out_n, r)[d * grad_out_n.dim] = from_float<T>(w * grad_d);
        }
        *at_row<A>(grad.grad_inputs[n].lse, r) = g;
        mean += w * g;
      }
      const A grad_lse = grad_output.lse.data ? *at_row<A>(grad_output.lse, r) : A(0);
      for (int64_t n = 0; n < p.states; n++) {
        A& grad_lse_n = *at_row<A>(grad.grad_inputs[n].lse, r);
        const A w = weight_of(n);
        grad_lse_n = w == A(0) ? A(0) : w * (grad_lse_n - mean + grad_lse);
      }
    });
  }

 private:
  static constexpr int64_t kMaxMergeDim = 256;
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
