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

  // w_n = e^(lse_n - lse): dout_n = w_n dout, dlse_n = w_n (dout . (out_n - out) + dlse)
  void run_grad(const MergeGradParams& grad, const Runner& runner) const {
    each_row(runner, [&](Row r) {
      const MergeState& grad_output = grad.grad_output;
      const T* out = at_row<T>(p.output.out, r);
      const T* grad_out = grad_output.out.data ? at_row<T>(grad_output.out, r) : nullptr;
      const A grad_lse = grad_output.lse.data ? *at_row<A>(grad_output.lse, r) : A(0);
      for (int64_t n = 0; n < p.states; n++) {
        const MergeState &input = p.inputs[n], &grad_input = grad.grad_inputs[n];
        State<A> state = state_of(input, r);
        T* grad_out_n = at_row<T>(grad_input.out, r);
        A w = state.l == A(0) ? A(0) : weight(state.m, *at_row<A>(p.output.lse, r)), dot = 0;
        for (int64_t d = 0; d < p.dim; d++) {
          A g = w == A(0) || !grad_out ? A(0) : A(to_float(grad_out[d * grad_output.out.dim]));
          grad_out_n[d * grad_input.out.dim] = from_float<T>(w * g);
          if (w != A(0) && grad_out)
            dot += g * (A(to_float(at_row<T>(input.out, r)[d * input.out.dim])) - A(to_float(out[d * p.output.out.dim])));
        }
        *at_row<A>(grad_input.lse, r) = w == A(0) ? A(0) : w * (dot + grad_lse);
      }
    });
  }

 private:
  static constexpr int64_t kMaxMergeDim = 256;
};

}  // namespace flashsoftmax::FLASHSOFTMAX_ISA
