"""Checks the results of a shape before it is timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .contenders import naive, ours, results
from .shapes import Inputs, Shape

CHECKED_ROWS = 64
CHECKED_HEADS = 4


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, evenly spread, with the first and the last."""
    return sorted(set(torch.linspace(0, count - 1, min(count, most)).long().tolist()))


def part(x: Tensor, head: int, heads: int) -> Tensor:
    """The part of x that belongs to key head `head`, where `heads` counts the key heads of all batch entries."""
    return x.flatten(0, 1).view(heads, -1, *x.shape[2:])[head : head + 1]


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def errors(shape: Shape, inputs: Inputs) -> Iterator[list[tuple[float, float, float]]]:
    """For some key heads, and there for the output and each gradient: our error, the naive error, the largest value."""
    everything = shape.kind == "forward + backward"  # the gradients of a key need all queries
    rows = torch.tensor(spread(shape.queries, shape.queries if everything else CHECKED_ROWS))
    rows = rows.to(inputs.query.device)
    heads = shape.batch * shape.heads_kv
    attend = partial(naive, rows=rows)
    found = results(ours, inputs, shape)
    for head in spread(heads, CHECKED_HEADS):
        query, key, value, grad = (part(x.detach(), head, heads) for x in inputs)
        some = Inputs(query[:, :, rows], key, value, grad[:, :, rows])
        exact, naives = (
            results(attend, Inputs(*(x.to(dtype).requires_grad_(everything) for x in some)), shape)
            for dtype in (torch.float64, query.dtype)
        )
        ours_here = [part(x, head, heads) for x in found]
        ours_here[:2] = [x[:, :, rows] for x in ours_here[:2]]  # the output and the gradient of the query
        yield [(largest(a - e), largest(n - e), largest(e)) for a, n, e in zip(ours_here, naives, exact, strict=True)]


def check(shape: Shape, inputs: Inputs) -> float:
    """Our largest error against float64, as a share of the allowed error.

    Allowed is twice the largest error of the naive computation in the same dtype, plus one rounding unit.
    """
    unit = torch.finfo(inputs.query.dtype).eps
    shares: list[float] = []
    for of_tensor in zip(*errors(shape, inputs), strict=True):
        error, naive_error, value = map(max, zip(*of_tensor, strict=True))
        shares.append(error / (2 * naive_error + unit * value))
    return max(shares)
