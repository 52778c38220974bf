"""Ulysses: the ranks of a group trade rows for heads, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..library import statistics
from .exchange import Arrival, Wire
from .layout import cut
from .plan import ShardPlan

Range = tuple[int, int]


def query_heads(heads: int, ranks: int) -> list[Range]:
    """The query heads of each rank."""
    return [(cut(heads, ranks, r), cut(heads, ranks, r + 1)) for r in range(ranks)]


def key_heads(queries: list[Range], group: int) -> list[Range]:
    """The key heads that the query heads of each rank read. Ranks may share one."""
    return [(first // group, (end - 1) // group + 1) for first, end in queries]


def aligned(key: Tensor, queries: Range, group: int) -> Tensor:
    """key [B, heads, rows, dim] of the heads that `queries` read, repeated if those do not share them evenly."""
    first, end = queries
    read = [h // group - first // group for h in range(first, end)]
    share, rest = divmod(len(read), key.size(1))
    if rest == 0 and read == [n // share for n in range(len(read))]:
        return key
    return torch.cat([key[:, h : h + 1] for h in read], 1)


class RowsToHeads(torch.autograd.Function):
    """Each x [B, all heads, own rows, dim] becomes [B, own heads, all rows of the Ulysses group, dim].

    heads: of each tensor, the heads of each rank. All tensors, and all their gradients, are exchanged by one call, so
    that ranks stay in step whichever gradients they want.
    """

    @staticmethod
    def forward(ctx: Any, plan: ShardPlan, heads: list[list[Range]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads = plan, heads
        return _to_heads(plan, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_rows(ctx.plan, ctx.heads, grads)


class HeadsToRows(torch.autograd.Function):
    """The inverse of RowsToHeads."""

    @staticmethod
    def forward(ctx: Any, plan: ShardPlan, heads: list[list[Range]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads = plan, heads
        return _to_rows(plan, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_to_heads(ctx.plan, ctx.heads, grads)


def _to_heads(plan: ShardPlan, heads: list[list[Range]], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    base, me = plan.holder * plan.ulysses, plan.rank % plan.ulysses
    counts = plan.rows[base : base + plan.ulysses]
    others = [p for p in range(plan.ulysses) if p != me]
    wire = Wire(plan.group, "Ulysses", tensors[0])
    wholes, pendings = [], []
    for x, ranges in zip(tensors, heads, strict=True):
        rows = x.permute(2, 0, 1, 3)
        first, end = ranges[me]
        whole = rows.new_empty(sum(counts), rows.size(1), end - first, rows.size(3))
        parts = whole.split(counts)
        sends = [(base + p, rows[:, :, slice(*ranges[p])]) for p in others]
        arrivals = [Arrival(base + p, parts[p]) for p in others]
        pendings.append((parts, wire.exchange(sends, arrivals, x.dtype, "rows to heads")))
        parts[me].copy_(rows[:, :, first:end])
        wholes.append(whole)
    for parts, pending in pendings:
        for p, part in zip(others, pending.wait(), strict=True):
            parts[p].copy_(part)  # in eager mode it is there already
    return tuple(wire.result(whole).permute(1, 2, 0, 3) for whole in wholes)


def _to_rows(plan: ShardPlan, heads: list[list[Range]], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Where ranks share a head, the sum of theirs, in float32 and in the order of the ranks."""
    base, me = plan.holder * plan.ulysses, plan.rank % plan.ulysses
    others = [p for p in range(plan.ulysses) if p != me]
    wire = Wire(plan.group, "Ulysses", tensors[0])
    pendings = []
    for x, ranges in zip(tensors, heads, strict=True):
        parts = x.permute(2, 0, 1, 3).split(plan.rows[base : base + plan.ulysses])
        own = parts[me]
        shapes = [(own.size(0), own.size(1), end - first, own.size(3)) for first, end in ranges]
        arrivals = [Arrival(base + p, own.new_empty(shapes[p])) for p in others]
        sends = [(base + p, parts[p]) for p in others]
        pendings.append((own, wire.exchange(sends, arrivals, x.dtype, "heads to rows")))
    results = []
    for ranges, (own, pending) in zip(heads, pendings, strict=True):
        found = dict(zip(others, pending.wait(), strict=True)) | {me: own}
        results.append(_joined([found[p] for p in range(plan.ulysses)], ranges))
    return tuple(wire.result(x).permute(1, 2, 0, 3) for x in results)


def _joined(parts: list[Tensor], heads: list[Range]) -> Tensor:
    """[rows, B, all heads, dim] from the heads of each rank."""
    if all(a[1] == b[0] for a, b in pairwise(heads)):
        return torch.cat(parts, 2)
    x = parts[0]
    total = x.new_zeros(x.size(0), x.size(1), heads[-1][1], x.size(3), dtype=statistics(x.dtype))
    for part, (first, end) in zip(parts, heads, strict=True):
        total[:, :, first:end] += part
    return total.to(x.dtype)
