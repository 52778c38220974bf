"""The seed of dropout, and the weights that it keeps. csrc/dropout.h is the same for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """(seed, offset) from torch's generator, as a tensor: so a GPU does not wait, and transforms see a random call."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_mask(batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, seed: Tensor) -> Tensor:
    """Which weights dropout keeps, for tests and debugging.

    Attention over jagged or variable-length sequences has the mask of a padded batch: sequence b is batch entry b, and
    queries and keys count from the first ones of their sequence.

    Args:
        batch, heads, seqlen_q, seqlen_k: the shape of the weights; heads is that of the query.
        dropout_p: the probability that a weight is dropped.
        seed: the ``dropout_seed`` of the call, int64 [2].

    Returns:
        bool [batch, heads, seqlen_q, seqlen_k], True where a weight is kept.

    Raises:
        ValueError: dropout_p or seed does not fit.
    """
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: {dropout_p:g}, wanted 0 to 1")
    if seed.dtype != torch.int64 or seed.shape != (2,):
        raise ValueError(f"seed: dtype {seed.dtype} and shape {[*seed.shape]}, wanted torch.int64 and [2]")
    shape = (batch, heads, seqlen_q, seqlen_k)
    dropped = 0 if dropout_p == 0 else max(1, int(dropout_p * 2**32 + 0.5))  # of 2^32 words
    axes = [torch.arange(n, device=seed.device) for n in (batch, heads, seqlen_q, (seqlen_k + 3) // 4)]
    b, h, i, j = (x.view([-1 if d == n else 1 for d in range(4)]) for n, x in enumerate(axes))
    head = _philox((*_halves(seed[1]), b, h), _halves(seed[0]))
    words = torch.stack(_philox((j, i, head[2], head[3]), (head[0], head[1])), -1).flatten(-2)
    return (words[..., :seqlen_k] >= dropped).expand(shape)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x & WORD, x >> 32 & WORD


def _philox(x: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four random words from a counter and a key, each word in an int64."""
    key0, key1 = key
    for _ in range(10):
        (low0, high0), (low1, high1) = _halves(x[0] * 0xD2511F53), _halves(x[2] * 0xCD9E8D57)
        x = (high1 ^ x[1] ^ key0, low1, high0 ^ x[3] ^ key1, low0)
        key0, key1 = key0 + 0x9E3779B9 & WORD, key1 + 0xBB67AE85 & WORD
    return x
