"""Ulysses: the ranks of a group trade rows for heads, and back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

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
    """x [B, all heads, own rows, dim] becomes [B, own heads, all rows of the Ulysses group, dim]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ShardPlan, heads: list[Range]) -> Tensor:
        ctx.plan, ctx.heads = plan, heads
        return _to_heads(x, plan, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_rows(grad, ctx.plan, ctx.heads), None, None


class HeadsToRows(torch.autograd.Function):
    """The inverse of RowsToHeads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ShardPlan, heads: list[Range]) -> Tensor:
        ctx.plan, ctx.heads = plan, heads
        return _to_rows(x, plan, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grad, ctx.plan, ctx.heads), None, None


def _to_heads(x: Tensor, plan: ShardPlan, heads: list[Range]) -> Tensor:
    rows = x.permute(2, 0, 1, 3)
    base, me = plan.holder * plan.ulysses, plan.rank % plan.ulysses
    counts = plan.rows[base : base + plan.ulysses]
    first, end = heads[me]
    whole = rows.new_empty(sum(counts), rows.size(1), end - first, rows.size(3))
    parts = whole.split(counts)
    others = [p for p in range(plan.ulysses) if p != me]
    sends = [(base + p, rows[:, :, slice(*heads[p])]) for p in others]
    wire = Wire(plan.group, "Ulysses", x)
    pending = wire.exchange(sends, [Arrival(base + p, parts[p]) for p in others], x.dtype)
    parts[me].copy_(rows[:, :, first:end])
    for p, part in zip(others, pending.wait(), strict=True):
        parts[p].copy_(part)  # in eager mode it is there already
    return wire.result(whole).permute(1, 2, 0, 3)


def _to_rows(x: Tensor, plan: ShardPlan, heads: list[Range]) -> Tensor:
    """Where ranks share a head, the sum of theirs, in float32 and in the order of the ranks."""
    base, me = plan.holder * plan.ulysses, plan.rank % plan.ulysses
    parts = x.permute(2, 0, 1, 3).split(plan.rows[base : base + plan.ulysses])
    others = [p for p in range(plan.ulysses) if p != me]
    own = parts[me]
    shapes = [(own.size(0), own.size(1), end - first, own.size(3)) for first, end in heads]
    sends = [(base + p, parts[p]) for p in others]
    arrivals = [Arrival(base + p, own.new_empty(shapes[p])) for p in others]
    wire = Wire(plan.group, "Ulysses", x)
    arrived = wire.exchange(sends, arrivals, x.dtype).wait()
    found = dict(zip(others, arrived, strict=True)) | {me: own}
    if all(a[1] == b[0] for a, b in pairwise(heads)):
        return wire.result(torch.cat([found[p] for p in range(plan.ulysses)], 2)).permute(1, 2, 0, 3)
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = own.new_zeros(own.size(0), own.size(1), heads[-1][1], own.size(3), dtype=dtype)
    for p in range(plan.ulysses):
        total[:, :, slice(*heads[p])] += found[p]
    summed: Tensor = wire.result(total.to(x.dtype)).permute(1, 2, 0, 3)
    return summed
