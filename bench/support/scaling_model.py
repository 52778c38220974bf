"""Predicts what ranks send and compute per step of sequence-parallel attention, and from that a time.

Which rows go from whom to whom comes from flashsoftmax.distributed itself: `key_hops` and `gradient_hops`, and for
Ulysses `query_heads` and `key_heads`. Listing the hops of hundreds of ranks takes long; for these `formula` has the
same figures in closed form. tests/test_scaling.py compares the bytes with those that ranks really send, and the two
with each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from flashsoftmax.distributed.heads import Range, aligned, key_heads, query_heads
from flashsoftmax.distributed.layout import UNBOUNDED, Band, Layout, Segment, cut
from flashsoftmax.distributed.routes import gradient_hops, key_hops

from .roofs import INFINIBAND, NVLINK, Link, Roof

Messages = Mapping[tuple[int, int], int]
"""Bytes by (sender, receiver)."""
ROUTED = 32
"""The most holders whose hops are listed."""


@dataclass(frozen=True)
class Fabric:
    name: str
    node: int
    """Ranks that NVLink connects. Between these groups of consecutive ranks there is InfiniBand."""

    def link(self, is_between: bool) -> Link:
        return INFINIBAND if is_between else NVLINK


@dataclass(frozen=True)
class Work:
    """Attention over a layout. Each of its holders is a Ulysses group."""

    layout: Layout
    band: Band
    heads: int
    heads_kv: int
    dim: int
    dtype: torch.dtype
    batch: int = 1
    ulysses: int = 1
    gather: bool = False

    @property
    def ranks(self) -> int:
        return self.layout.holders * self.ulysses

    @property
    def query_heads(self) -> list[Range]:
        """The query heads of each rank of a Ulysses group."""
        return query_heads(self.heads, self.ulysses)

    @property
    def key_heads(self) -> list[Range]:
        return key_heads(self.query_heads, self.heads // self.heads_kv)

    def rows(self, holder: int) -> list[int]:
        """The rows of each rank of a Ulysses group."""
        count = self.layout.rows[holder]
        return [cut(count, self.ulysses, p + 1) - cut(count, self.ulysses, p) for p in range(self.ulysses)]

    def key_bytes(self, part: int, is_gradient: bool) -> int:
        """Bytes per row of the keys and values that a rank of a Ulysses group attends to, or of their gradients."""
        first, end = self.key_heads[part]
        keys = torch.empty(1, end - first, 0, self.dim, device="meta")
        count = aligned(keys, self.query_heads[part], self.heads // self.heads_kv).size(1)
        size = self.dtype.itemsize
        return 2 * self.batch * count * self.dim * (max(size, 4) if is_gradient else size)


@dataclass(frozen=True)
class Step:
    """What is computed while messages are exchanged."""

    pairs: int = 0
    """Pairs of a query and a visible key, per head: of the rank that has most."""
    sent: int = 0
    """Bytes over the slowest link in use, one way: of the rank that sends or receives most."""
    is_between: bool = False
    """Whether that link is between nodes."""


def trades(work: Work, holder: int, backward: bool) -> Iterator[Messages]:
    """The exchanges of rows for heads, and back, within a Ulysses group."""
    rows, size = work.rows(holder), work.dtype.itemsize
    queries, keys = work.query_heads, work.key_heads
    row = work.batch * work.dim * size
    to_heads, to_rows = ([queries], [queries, keys, keys]) if backward else ([queries, keys, keys], [queries])
    base = holder * work.ulysses
    pairs = [(s, r) for s in range(work.ulysses) for r in range(work.ulysses) if s != r]
    for heads in to_heads:
        yield {(base + s, base + r): rows[s] * (heads[r][1] - heads[r][0]) * row for s, r in pairs}
    for heads in to_rows:
        yield {(base + s, base + r): rows[r] * (heads[s][1] - heads[s][0]) * row for s, r in pairs}
    row = work.batch * max(size, 4)  # of lse, and of its gradient
    if backward:
        yield {(base + s, base + r): rows[s] * (queries[r][1] - queries[r][0]) * row for s, r in pairs}
    else:
        yield {(base + s, base + r): rows[r] * (queries[s][1] - queries[s][0]) * row for s, r in pairs}


def hops(work: Work, is_gradient: bool) -> dict[int, Messages]:
    """What is sent at each step of keys and values, or of their gradients."""
    routes = gradient_hops if is_gradient else key_hops
    row = [work.key_bytes(part, is_gradient) for part in range(work.ulysses)]
    steps: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for h in routes(work.layout, work.band, work.gather):
        for part in range(work.ulysses):
            ends = h.sender * work.ulysses + part, h.receiver * work.ulysses + part
            steps[h.step][ends] += (h.end - h.start) * row[part]
    return dict(steps)


def sent(work: Work, backward: bool) -> Counter[tuple[int, int]]:
    """All bytes of a forward or a backward."""
    total: Counter[tuple[int, int]] = Counter()
    for is_gradient in (False, True) if backward else (False,):
        for messages in hops(work, is_gradient).values():
            total.update(messages)
    for holder in range(work.layout.holders):
        for messages in trades(work, holder, backward):
            total.update(messages)
    return +total


def worst(messages: Messages, node: int) -> tuple[int, bool]:
    """Bytes that the busiest rank sends or receives between nodes, or, if none does, inside. And which it was.

    A link inside is so much faster that it is done first.
    """
    between = {ends: size for ends, size in messages.items() if ends[0] // node != ends[1] // node}
    busy: Counter[tuple[str, int]] = Counter()
    for (sender, receiver), size in (between or messages).items():
        busy["out", sender] += size
        busy["in", receiver] += size
    return max(busy.values(), default=0), bool(between)


def formula(work: Work, node: int, is_gradient: bool) -> dict[int, tuple[int, bool]]:
    """`worst` of each step of `hops`, without listing them.

    For one document that the chunks divide: causal in zigzag, or causal with a window in a contiguous layout. The ranks
    are of one node, or of two and more whole ones, and the window leaves out the keys of a node at least.
    """
    n, whole = work.layout.holders, max(1, node // work.ulysses)
    crosses = n > whole
    rows, left = work.layout.lengths[0] // n, work.band.left
    last = min(-(-left // rows), n - 1)  # how many ranks further on see a rank's keys
    seen = [min(rows, left - d * rows) for d in range(last)]
    if n == 1:
        found: dict[int, int] = {}
    elif work.gather:
        reach = n - whole if crosses else n - 1  # ranks that one rank can send to over the slowest link
        found = {2 if is_gradient else 0: sum(seen[:reach])}
    elif work.layout.name == "zigzag" and is_gradient:
        found = {t: rows // 2 if crosses and t <= whole else rows for t in range(2, n + 1)}
    elif work.layout.name == "zigzag":
        found = dict.fromkeys(range(last), rows)
        for t in range(last):
            # Besides a head and a tail that it passes on, rank n - 1 - t sends its own tail to rank 0.
            rank = n - 1 - t
            if rank < t and (not crosses or (rank >= whole and (rank + 1) % whole == 0)):
                found[t] += rows // 2
    elif is_gradient:
        found = dict.fromkeys(range(2, last + 2), min(rows, left))
        for t in range(2, min(last, n // 2) + 1):
            # Besides gradients that it passes on, rank n - t gets those of its own keys.
            if not crosses or (t > whole and t % whole == 0):
                found[t] *= 2
    else:
        found = dict(enumerate(seen))
    row = max(work.key_bytes(part, is_gradient) for part in range(work.ulysses))
    return {t: (count * row, crosses) for t, count in found.items() if count}


def steps(work: Work, node: int, backward: bool) -> Iterator[Step]:
    """The steps of a forward or a backward, in some order.

    Gradients travel beside keys, and count as if both had the same busiest rank.
    """
    holders = range(work.layout.holders) if len(set(work.layout.rows)) > 1 else range(1)
    exchanges = [trades(work, holder, backward) for holder in holders] if work.ulysses > 1 else []
    for group in zip(*exchanges, strict=True):
        yield Step(0, *worst({ends: size for messages in group for ends, size in messages.items()}, node))
    kinds = (False, True) if backward else (False,)
    if is_routed(work):
        sides = [{t: worst(x, node) for t, x in hops(work, kind).items()} for kind in kinds]
        computed = pairs(work, range(work.layout.holders))
    else:
        sides = [formula(work, node, kind) for kind in kinds]
        computed = pairs(work, [work.layout.holders - 1])  # which has as many as any
    for t in sorted(computed.keys() | {t for side in sides for t in side}):
        found = [side[t] for side in sides if t in side]
        yield Step(computed[t], sum(size for size, _ in found), any(is_between for _, is_between in found))


def is_routed(work: Work) -> bool:
    return work.layout.holders <= ROUTED


def pairs(work: Work, holders: Iterable[int]) -> Counter[int]:
    """Pairs of a query and a visible key at each step, per head: of that one of the holders which has most."""
    most: Counter[int] = Counter()
    for holder in holders:
        found: Counter[int] = Counter()
        for owner, segments in enumerate(work.layout.segments):
            t = (holder - owner) % work.layout.holders
            t = min(t, 1) if work.gather else t
            for query in work.layout.segments[holder]:
                found[t] += sum(visible(work.band, query, key) for key in segments)
        most |= found
    return most


def visible(band: Band, query: Segment, key: Segment) -> int:
    """Pairs of a position of query and one of key that it sees."""
    if query.document != key.document:
        return 0
    return up_to(band.right, query, key) - (0 if band.left == UNBOUNDED else up_to(-band.left - 1, query, key))


def up_to(offset: int, query: Segment, key: Segment) -> int:
    """Pairs of a position i of query and a position of key that is at most i + offset."""
    rows = query.end - query.start

    def triangle(first: int) -> int:
        """max(0, first) + max(0, first + 1) + ..., one term per row."""
        skipped = min(rows, max(0, -first))
        count = rows - skipped
        return count * (first + skipped) + count * (count - 1) // 2

    first = query.start + offset + 1 - key.start
    return triangle(first) - triangle(first - (key.end - key.start))


def flops(work: Work, count: int, backward: bool) -> int:
    """FLOPs of a number of pairs per head: two products of matrices in the forward, five in the backward."""
    heads = max(end - first for first, end in work.query_heads)
    return count * work.batch * heads * 2 * work.dim * (5 if backward else 2)


def seconds(work: Work, step: Step, backward: bool, fabric: Fabric, gpu: Roof) -> float:
    """The larger of what arithmetic and messages take."""
    link = fabric.link(step.is_between)
    exchange = link.latency + step.sent / link.bandwidth if step.sent else 0.0
    return max(flops(work, step.pairs, backward) / gpu.peak[str(work.dtype).removeprefix("torch.")], exchange)
