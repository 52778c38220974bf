// How the gradient of a bias is summed: along an axis that is broadcast, an element of it is the sum of several dS.
#pragma once

#include "../params.h"

namespace flashsoftmax::cuda {

struct BiasSum {
  int64_t sequences, heads, rows, keys;  // of the gradient: 1 along an axis that is broadcast
  bool wanted;                           // whether there is a gradient to be written
  // Blocks that share the sum of a tile. If there are several, each writes its own gradient to scratch memory. Their
  // number follows from sizes alone, so the order of a sum is the same on every GPU.
  int64_t parts = 1;

  explicit BiasSum(const AttentionBackwardParams& args)
      : sequences(args.grad_bias.batch ? args.forward.sequences : 1),
        heads(args.grad_bias.head ? args.forward.heads_q : 1),
        rows(args.grad_bias.row ? args.forward.rows_q : 1),
        keys(args.grad_bias.dim ? args.forward.seqlen_k : 1) {
    const AttentionParams& forward = args.forward;
    wanted = args.grad_bias.data && forward.seqlen_k > 0;
    if (!wanted) return;
    // A bias with fewer than kTiles tiles of rows is cut into parts, to occupy the GPU. A part sums at least kTerms
    // tiles of dS, so all parts take at most 1 / kTerms of the memory of dS.
    constexpr int64_t kRows = 64, kTerms = 16, kTiles = 32;
    const auto tiles = [](int64_t count) { return (count + kRows - 1) / kRows; };
    const int64_t terms =
        forward.sequences / sequences * (forward.heads_q / heads) * tiles(forward.rows_q) / tiles(rows);
    parts = max<int64_t>(1, min(kTiles / tiles(rows), terms / kTerms));
  }
  FLASHSOFTMAX_INLINE int64_t elements() const { return sequences * heads * rows * keys; }
  int64_t bytes() const { return parts > 1 ? parts * elements() * int64_t(sizeof(float)) : 0; }
};

}  // namespace flashsoftmax::cuda
